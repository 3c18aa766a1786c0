"""The files of a GGUF model. A large model may be split into files NAME-00001-of-00003.gguf, of which the first has all
keys; each file has the table of its own tensors."""

import mmap
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvferry.core.errors import ModelFileError
from kvferry.weights.checkpoints.gguf.header import Header, TensorInfo, Value, read_header
from kvferry.weights.files.regular_file import map_file

_MAX_PARTS = 1024
_NUMBERED = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


def part_paths(path: Path) -> list[Path]:
    """Return the paths of all files of a model by the name of its first file."""
    match = _NUMBERED.fullmatch(path.name)
    if match is None or int(match[3]) > _MAX_PARTS:
        return [path]
    return [path.with_name(f"{match[1]}-{number:05}-of-{match[3]}.gguf") for number in range(1, int(match[3]) + 1)]


def model_name(path: Path) -> str:
    """Return the name of a model by the name of its file, or of its first file."""
    match = _NUMBERED.fullmatch(path.name)
    return path.stem if match is None else match[1]


@dataclass(frozen=True, slots=True)
class GgufParts:
    """The open files of a model, with one header for all."""

    header: Header
    """Keys of the first file, and the tensors of all files."""
    files: tuple[mmap.mmap | bytes, ...]
    _file_of: dict[str, int]

    @classmethod
    def open(cls, path: Path) -> "GgufParts":
        """Open all files.

        Args:
            path: the first file.

        Raises:
            ModelFileError: a file is missing or damaged, is not the part in its name, or has a tensor of another
                file.
        """
        first = map_file(path)
        header = read_header(first, path)
        count = _whole(header.pairs.get("split.count"), 1)
        paths = part_paths(path)
        if _whole(header.pairs.get("split.no"), 0) != 0 or count != len(paths):
            raise ModelFileError(
                f"{path}: split.no = {header.pairs.get('split.no')} and split.count = {count} of the header are not"
                " those of the file's name. Give the first file, NAME-00001-of-0000N.gguf"
            )
        files, tensors, file_of = [first], dict(header.tensors), dict.fromkeys(header.tensors, 0)
        for number, other in enumerate(paths[1:], start=1):
            data = map_file(other)
            part = read_header(data, other)
            if _whole(part.pairs.get("split.no"), 0) != number:
                raise ModelFileError(
                    f"{other}: split.no is {part.pairs.get('split.no')} instead of {number}. Download the file again"
                )
            twice = sorted(part.tensors.keys() & tensors.keys())
            if twice:
                raise ModelFileError(f"{other}: tensor {twice[0]!r} is in more than one file of the model")
            files.append(data)
            tensors |= part.tensors
            file_of |= dict.fromkeys(part.tensors, number)
        return cls(Header(header.pairs, tensors), tuple(files), file_of)

    def bytes_of(self, info: TensorInfo) -> npt.NDArray[np.uint8]:
        """Return the bytes of a tensor, as a read-only view of its file."""
        data = self.files[self._file_of[info.name]]
        return np.frombuffer(data, dtype=np.uint8, count=info.num_bytes, offset=info.start)

    def release(self) -> None:
        """Unmap the resident pages of the files from this process; the pages may stay in the page cache."""
        for data in self.files:
            if isinstance(data, mmap.mmap):
                data.madvise(mmap.MADV_DONTNEED)


def _whole(value: Value | None, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else default
