"""The product's own entry with a tiny runner instead of a model, and one fault. Faults live here and nowhere else.

Environment:
    FAULT        what to do wrong, on rank FAULT_RANK (1 unless set):
                 software   reports another version of torch
                 slowload   loads for a minute
                 stuckload  the same, in a call that no signal ends
                 latemeet   comes three seconds late to the meeting of the ranks
                 lateready  sees two seconds late that all are ready
                 badload    finds the model damaged while the others load for a minute
                 slow       steps take four times as long
                 raise, token, hang, stop, kill    in a step: raises, samples another token, hangs, SIGSTOP, SIGKILL
                 watcher, messenger    in a step: the thread of that name raises
                 http       in a step: the frontend's event loop stands still from the next output on
                 stopclose  SIGSTOP at the end, after the step loop
                 stopleave  the same, once it has said that it is ready to leave
    STEP_TIME    seconds that a step takes
    SKEW         seconds by which the clock of rank FAULT_RANK is off
    HASHSEEDS    if set, every rank gets another PYTHONHASHSEED
    CONNECT_S    how long ranks wait for each other at the start, instead of the product's own time
    SILENCE_S    how long a rank may be silent after a stop, instead of the product's own time
    REPORT_S     seconds that it takes to leave word for torchrun

Faults of the forward pass fire in the step that admits a request with the seed TRIGGER_SEED.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

TRIGGER_SEED = 13
RANK = int(os.environ.get("RANK", "0"))
IS_FAULTY = int(os.environ.get("FAULT_RANK", "1")) == RANK
FAULT = os.environ.get("FAULT", "") if IS_FAULTY else ""
STEP_TIME = float(os.environ.get("STEP_TIME", "0.005"))


def main() -> None:
    if os.environ.get("HASHSEEDS") and os.environ.get("PYTHONHASHSEED") != str(RANK + 1):
        os.environ["PYTHONHASHSEED"] = str(RANK + 1)
        os.execv(sys.executable, [sys.executable, *sys.argv])
    if IS_FAULTY and os.environ.get("SKEW"):
        real, skew = time.monotonic, float(os.environ["SKEW"])
        time.monotonic = lambda: real() + skew
    from spmd_serve import __main__ as product

    if os.environ.get("CONNECT_S"):
        from spmd_serve.distributed import board

        board.CONNECT_TIMEOUT_S = float(os.environ["CONNECT_S"])
    if os.environ.get("SILENCE_S"):
        from spmd_serve.distributed import judgement

        judgement.STOP_SILENCE_S = float(os.environ["SILENCE_S"])
    if os.environ.get("REPORT_S"):
        from spmd_serve.distributed import liveness

        tell, pause = liveness.tell_torchrun, float(os.environ["REPORT_S"])

        def tell_slowly(message: str, details: str = "") -> None:
            time.sleep(pause)
            tell(message, details)

        liveness.tell_torchrun = tell_slowly
    _replace_runner()
    _replace_the_board()
    if FAULT == "software":
        _pretend_other_software()
    product.run()


def _replace_runner() -> None:
    import torch

    from spmd_serve import assembly
    from spmd_serve.distributed import beats, liveness
    from spmd_serve.errors import ModelError
    from spmd_serve.frontend import dispatcher
    from spmd_serve.types import ScheduledBatch, StepTokens

    class Step:
        def __init__(self, tokens: list[int]) -> None:
            self._tokens = tokens

        def wait(self) -> StepTokens:
            return StepTokens(self._tokens)

    class TinyRunner:
        """Tokens that depend on the row and the step; one all-reduce per step, like a real runner's last one."""

        def __init__(self, comm: object) -> None:
            self._comm = comm
            self._other_token = False

        def allocate(self, num_pages: int, cuda_graphs: bool) -> None:
            pass

        def close(self) -> None:
            if FAULT == "stopclose":
                os.kill(os.getpid(), signal.SIGSTOP)

        def launch(self, batch: ScheduledBatch) -> Step:
            if any(row.params.seed == TRIGGER_SEED for row in batch.new_rows):
                self._fail()
            time.sleep(STEP_TIME * (4 if FAULT == "slow" else 1))
            present = self._comm.all_reduce(torch.ones(1))
            assert present.item() == torch.distributed.get_world_size()
            rows = [*batch.decode_slots, *(chunk.slot for chunk in batch.chunks if chunk.samples)]
            tokens = [1000 + (31 * slot + 7 * batch.step) % 9000 for slot in rows]
            if self._other_token:
                tokens[0] += 1
            return Step(tokens)

        def _fail(self) -> None:
            if FAULT == "raise":
                raise ZeroDivisionError("injected into the forward pass")
            if FAULT == "token":
                self._other_token = True
            if FAULT == "hang":
                time.sleep(3600)
            if FAULT == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if FAULT == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if FAULT == "watcher":
                liveness.Liveness._evidence = out_of_memory
            if FAULT == "http":
                dispatcher.Dispatcher._apply = lambda *_: time.sleep(3600)
            if FAULT == "messenger":
                beats.Messenger._put_beat = out_of_memory

    def out_of_memory(*arguments: object) -> None:
        raise MemoryError("injected into a thread")

    def build_runner(plan: object, comm: object) -> TinyRunner:
        if FAULT == "slowload":
            print("loading slowly", flush=True)
            time.sleep(60)
        if FAULT == "stuckload":
            print("loading slowly", flush=True)
            end = time.monotonic() + 60
            while time.monotonic() < end:
                with contextlib.suppress(BaseException):
                    time.sleep(60)
        if FAULT == "badload":
            raise ModelError("injected into the loading")
        if os.environ.get("FAULT") == "badload":
            time.sleep(60)
        return TinyRunner(comm)

    assembly.build_runner = build_runner


def _replace_the_board() -> None:
    from spmd_serve.distributed import board

    meet, gather = board.open_board, board.Board.gather

    def meet_late(*arguments: object) -> board.Board:
        print("meeting late", flush=True)
        time.sleep(3)
        return meet(*arguments)

    def gather_late(self: board.Board, name: str, value: object) -> list[object]:
        values = gather(self, name, value)
        if name == "ready":
            time.sleep(2)
        return values

    def suspended_when_leaving(self: board.Board) -> None:
        say_leaving(self)
        os.kill(os.getpid(), signal.SIGSTOP)

    say_leaving = board.Board.say_leaving
    if FAULT == "stopleave":
        board.Board.say_leaving = suspended_when_leaving
    if FAULT == "latemeet":
        board.open_board = meet_late
    if FAULT == "lateready":
        board.Board.gather = gather_late


def _pretend_other_software() -> None:
    from spmd_serve import assembly

    real = assembly.software_fingerprint
    assembly.software_fingerprint = lambda: real() | {"torch version": "1.0"}


if __name__ == "__main__":
    main()
