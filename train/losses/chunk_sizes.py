"""The number of logits held at a time: set by the device's memory or by one setting. `draftsmith plan` reads it too."""

from dataclasses import dataclass

import torch

PARTS = 8  # parts per chunk on a CPU: a part that fits its cache is read faster, and a launch costs next to nothing


@dataclass(frozen=True)
class ChunkSizes:
    """The chunk sizes of a loss, or of another walk over the logits of many positions."""

    chunk: int  # logits of a chunk, the unit of the matrix products: with fewer they would wait for the head's weight
    part: int  # logits of a part of a chunk, the unit of the loss, which holds about ten float32 tensors of this size

    @classmethod
    def of(cls, device: torch.device, logits: int | None = None) -> "ChunkSizes":
        """Return the sizes for a device, with chunks of `logits` if given."""
        if device.type == "cuda":
            return cls.on_gpu(torch.cuda.get_device_properties(device).total_memory, logits)
        return ON_CPU if logits is None else cls(logits, max(1, logits // PARTS))

    @classmethod
    def on_gpu(cls, memory: float, logits: int | None = None) -> "ChunkSizes":
        """Return the sizes for a GPU with `memory` bytes: one part per chunk.

        A kernel launch takes some microseconds, in which an H100 computes 10⁷ logits. So chunks are as large as memory
        allows: a chunk's ten tensors take a fifteenth of it. For 80 GiB: 2²⁷ logits, 880 positions of 152k tokens.
        """
        size = 2 ** (int(memory / 512).bit_length() - 1) if logits is None else logits
        return cls(size, size)

    def chunks(self, count: int, vocab_size: int) -> list[slice]:
        """Return the chunks of `count` positions, as slices."""
        return slices(count, self.chunk // vocab_size)

    def parts(self, count: int, vocab_size: int) -> list[slice]:
        """Return the parts of a chunk of `count` positions, as slices."""
        return slices(count, self.part // vocab_size)


ON_CPU = ChunkSizes(2**24, 2**24 // PARTS)


def slices(count: int, size: int) -> list[slice]:
    """Return slices of `size` (at least 1) over `count`, or one empty slice if `count` is 0."""
    size = max(1, size)
    return [slice(start, start + size) for start in range(0, max(count, 1), size)]
