"""What a model folder holds beside weights: read with the model, and written byte for byte beside trained weights."""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

CONFIG: Final = "config.json"
_FOLDERS: Final = ("additional_chat_templates",)
_WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5", ".msgpack", ".index.json")
_ADAPTER: Final = "adapter_config.json"
_LARGEST: Final = 64 * 1024**2
"""Bytes. Tokenizer files are smaller; what is larger is data of some kind."""
_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of one folder, in memory: the folder may be gone when a long job ends."""

    content: Mapping[str, bytes]
    """By path in the folder, such as ``tokenizer.json``."""

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read config, tokenizer, templates and code. A file that cannot be read is left out, with a warning."""
        content = {}
        for path in side_files(folder):
            try:
                content[str(path.relative_to(folder))] = path.read_bytes()
            except OSError as error:
                _log.warning("%s cannot be read (%s): a saved model will lack it", path, error)
        return cls(content)

    def config(self) -> dict[str, Any] | None:
        """Return what config.json says; None where there is none that holds a JSON object."""
        try:
            found = json.loads(self.content[CONFIG])
        except (KeyError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def write(self, folder: Path, config: Mapping[str, Any]) -> None:
        """Write all of them into a folder that holds weights already, and a config in place of config.json.

        A file that cannot be written is left out, with a warning: the weights are worth more.
        """
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        for name, content in {**self.content, CONFIG: text.encode()}.items():
            path = folder / name
            try:
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(content)
            except OSError as error:
                _log.warning("%s cannot be written (%s): copy it from the model folder of the job", path, error)


def side_files(folder: Path) -> Iterator[Path]:
    """Yield the files of a model folder that are not weights."""
    for place in (folder, *(folder / name for name in _FOLDERS)):
        for path in sorted(place.iterdir()) if place.is_dir() else ():
            is_weight = path.name.endswith(_WEIGHTS) or path.name == _ADAPTER
            if path.is_file() and not is_weight and path.stat().st_size <= _LARGEST:
                yield path


def saved_config(
    source: Mapping[str, Any], dtype: str, architectures: Sequence[str], *, is_critic: bool
) -> dict[str, Any]:
    """Say what config.json holds of a model that was trained: what its source's does, but for what is another.

    All keys are as the source spells them; `dtype` is that of most weights, and `architectures` are classes that read
    them.
    """
    config = {**source, "architectures": list(architectures)} if architectures else dict(source)
    config["torch_dtype" if "torch_dtype" in source else "dtype"] = dtype
    config.pop("quantization_config", None)  # what is trained is stored plainly
    if is_critic:
        if len(source.get("id2label") or ()) != 1:
            config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        config.pop("num_labels", None)
        config["classifier_dropout"] = 0.0  # a value is a regression: noise in its last layer would only blur it
    return config
