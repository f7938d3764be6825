#!/usr/bin/env bash
# One model over several hosts: run this on each of them. Checks what usually goes wrong, then starts torchrun.
set -euo pipefail
self=${BASH_SOURCE[0]}
if [ -L "$self" ]; then self=$(readlink -f "$self"); fi
# shellcheck source=launch/venv.sh
. "$(dirname "$self")/venv.sh"
# shellcheck source=launch/ranks.sh
. "$(dirname "$self")/ranks.sh"

usage() {
    cat <<'HELP'
Usage: launch/multinode.sh --head HOST --nnodes K --node-rank I [OPTION...] [-- SERVER OPTION...]

Run it on each of K hosts, with I = 0 on the head and another I on each of the rest. Rank 0 and its HTTP server are on the
head, whose server options count. Before torchrun starts, names, interface and port are checked and the nodes say hello to the head, so that a wrong
name, a taken port or different node counts end with one line that says so. Example for two hosts:

  hostA$ launch/multinode.sh --head hostA --nnodes 2 --node-rank 0 -- --model /models/qwen3-32b
  hostB$ launch/multinode.sh --head hostA --nnodes 2 --node-rank 1 -- --model /models/qwen3-32b

Options (in brackets the environment variable that gives the default):
  --head HOST        name or address of the first node, as all nodes reach it  [MASTER_ADDR]
  --port PORT        port on the head for torchrun's store (default: 29500)  [MASTER_PORT]
  --nnodes K         number of nodes  [PET_NNODES]
  --node-rank I      0 on the head  [PET_NODE_RANK]
  --nproc N          ranks on this node (default: its NVIDIA GPUs, or 1)  [PET_NPROC_PER_NODE]
  --interface NAME   network interface of the ranks (default: the one that leads to the head)  [GLOO_SOCKET_IFNAME]
  --max-restarts R   how often torchrun starts the ranks again after a failure (default: 0)  [PET_MAX_RESTARTS]
  --preset NAME      settings for a kind of network: launch/presets/NAME.env
  --wait SECONDS     how long to wait for the other nodes (default: 600)
  --check            only check, start nothing

HELP
    venv_environment_help
    cat <<'HELP'

SIGTERM on any node drains them all. The script exits 0 after a clean drain, 2 when the server
refuses what it is given (which is not started again), else with torchrun's code.
HELP
}

head=${MASTER_ADDR:-}
port=${MASTER_PORT:-29500}
nnodes=${PET_NNODES:-}
node_rank=${PET_NODE_RANK:-}
nproc=${PET_NPROC_PER_NODE:-}
max_restarts=${PET_MAX_RESTARTS:-0}
interface=
wait_seconds=600
check_only=
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help)
            usage
            exit 0
            ;;
        --check) check_only=yes ;;
        --)
            shift
            break
            ;;
        --head | --port | --nnodes | --node-rank | --nproc | --interface | --max-restarts | --preset | --wait)
            [ $# -gt 1 ] || die "$1 needs a value (see --help)"
            case $1 in
                --head) head=$2 ;;
                --port) port=$2 ;;
                --nnodes) nnodes=$2 ;;
                --node-rank) node_rank=$2 ;;
                --nproc) nproc=$2 ;;
                --interface) interface=$2 ;;
                --max-restarts) max_restarts=$2 ;;
                --wait) wait_seconds=$2 ;;
                --preset)
                    preset=$ROOT/launch/presets/$2.env
                    [ -r "$preset" ] || die "there is no $preset; see launch/presets"
                    set -a
                    # shellcheck source=/dev/null
                    . "$preset"
                    set +a
                    ;;
            esac
            shift
            ;;
        *) die "unknown option '$1' (see --help; server options come after --)" ;;
    esac
    shift
done
for name in head nnodes node_rank; do
    [ -n "${!name}" ] || die "--${name//_/-} is missing (see --help)"
done
if [ -z "$nproc" ]; then
    nproc=$(gpu_count)
    if [ "$nproc" -eq 0 ]; then nproc=1; fi
fi
for number in "$nnodes" "$nproc"; do
    [[ $number =~ ^[1-9][0-9]*$ ]] || die "'$number' is not a number of nodes or ranks, which is 1 or more"
done
[[ $port =~ ^[0-9]+$ ]] || die "--port is '$port'; it must be a number"
[[ $max_restarts =~ ^[0-9]+$ ]] || die "--max-restarts is '$max_restarts'; it must be a number, 0 or more"
[[ $wait_seconds =~ ^[0-9]+$ ]] || die "--wait is '$wait_seconds'; it must be a number of seconds"
[[ $node_rank =~ ^[0-9]+$ ]] || die "--node-rank is '$node_rank'; it is 0 on the head and 1, 2, ... on the other nodes"

ensure_python
if [ -n "$interface" ]; then export GLOO_SOCKET_IFNAME=$interface NCCL_SOCKET_IFNAME="=$interface"; fi
# The nodes may wait for each other for long: what stops this script meanwhile ends the check too, which holds the port.
stop_check() {
    kill "$check" 2>/dev/null || true
    if [ -n "$check_only" ]; then exit 1; fi
    say "stopped while it waited for the other nodes"
    exit 0
}
exec 9< <(exec "${die_with_parent[@]}" "$PYTHON" "$ROOT/launch/preflight.py" --head "$head" --port "$port" \
    --nnodes "$nnodes" --node-rank "$node_rank" --wait "$wait_seconds" --interface "${GLOO_SOCKET_IFNAME:-}")
check=$!
trap stop_check TERM INT HUP
wait "$check" || exit 1
read -r head_address <&9
exec 9<&-
if [ -n "$check_only" ]; then exit 0; fi

# Static rendezvous: node ranks are the given ones, so that rank 0 is on the head (c10d would sort hosts by name).
run_ranks "$nproc" --nnodes="$nnodes" --node-rank="$node_rank" --rdzv-backend=static --master-addr="$head_address" \
    --master-port="$port" --max-restarts="$max_restarts" -m spmd_serve "$@" || exit $?
