"""A hub repository's config.json and headers, read through byte ranges: no weight is downloaded."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lamella.checkpoint.header import DTYPE_BYTES, TensorInfo
from lamella.checkpoint.source import read_json
from lamella.errors import UserError


@dataclass(frozen=True)
class Remote:
    """What a repository says of its model.

    Attributes:
        config: config.json; config_path: where its copy lies.
        tensors: of all weight files; None: it has no safetensors.
        notes: what was assumed.
    """

    config: Mapping[str, Any]
    config_path: Path
    tensors: tuple[TensorInfo, ...] | None
    notes: tuple[str, ...] = ()


def read_remote(hub_id: str, endpoint: str | None = None) -> Remote:
    """Read a repository through `huggingface_hub`: its config.json (kept in that library's cache), the index, and the first
    bytes of each weight file.

    Args:
        hub_id: owner/name.
        endpoint: the hub's address; None: HF_ENDPOINT, or the public one.

    Raises:
        UserError: no such repository, or a private or gated one; no config.json; headers that cannot be read; no network.
    """
    from huggingface_hub import HfApi, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        NotASafetensorsRepoError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        SafetensorsParsingError,
    )

    # huggingface_hub 1.x speaks through httpx, 2.x through httpx2
    transport = [importlib.import_module(name).HTTPError for name in ("httpx", "httpx2") if find_spec(name)]
    api = HfApi(endpoint=endpoint)
    try:
        get_hf_file_metadata(hf_hub_url(hub_id, "config.json", endpoint=endpoint))  # without the retries of a download
        path = Path(api.hf_hub_download(hub_id, "config.json"))
        config = read_json(path)
        try:
            files = api.get_safetensors_metadata(hub_id).files_metadata
        except NotASafetensorsRepoError:
            return Remote(config, path, None, (f"{hub_id} has no safetensors: shapes follow from its config.json",))
    except GatedRepoError as error:
        raise UserError(f"hub repository {hub_id!r} is gated", fix="ask for access on its page, then log in with `hf auth login`"
                        ) from error  # fmt: skip
    except (RepositoryNotFoundError, HFValidationError) as error:
        fix = "check the name; for a private one log in with `hf auth login`"
        raise UserError(f"no local folder and no hub repository: {hub_id!r}", fix=fix) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise UserError(f"{hub_id!r} is no local folder and the hub cannot be reached: {_reason(error)}",
                        fix="check the network, or give a local config.json") from error  # fmt: skip
    except EntryNotFoundError as error:
        raise UserError(f"hub repository {hub_id!r} lacks a file: {_reason(error)}",
                        fix="give one in Hugging Face layout (config.json and safetensors)") from error  # fmt: skip
    except SafetensorsParsingError as error:
        raise UserError(f"a weight file of {hub_id!r} has no readable header: {_reason(error)}",
                        fix="report it to the repository's owner") from error  # fmt: skip
    except (HfHubHTTPError, OSError, *transport) as error:
        raise UserError(f"{hub_id!r} is no local folder and the hub cannot be reached: {_reason(error)}",
                        fix="check the network, or give a local config.json") from error  # fmt: skip
    tensors = [_info(name, t, Path(file)) for file, meta in files.items() for name, t in meta.tensors.items()]
    return Remote(config, path, tuple(tensors))


def _info(name: str, tensor: Any, file: Path) -> TensorInfo:
    begin, end = tensor.data_offsets
    if tensor.dtype not in DTYPE_BYTES:
        raise UserError(f"tensor {name!r} of {file} has dtype {tensor.dtype!r}, which is not supported",
                        fix="use a bf16, fp16 or fp32 checkpoint")  # fmt: skip
    return TensorInfo(name, file, tensor.dtype, tuple(tensor.shape), begin, end - begin)


def _reason(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
