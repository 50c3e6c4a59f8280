"""The number of logits held at a time, by the device's memory or by one setting, which `draftsmith plan` reads too."""

from dataclasses import dataclass

import torch

PARTS = 8
"""Parts of a chunk on a CPU: what lies in its cache is read faster, and a launch costs next to nothing."""


@dataclass(frozen=True)
class ChunkSizes:
    """How a loss, or whatever else walks the logits of many positions, is cut."""

    chunk: int
    """Logits of a chunk, which matrix products are taken over: fewer would wait for the head's weight to be read."""
    part: int
    """Logits of a part of a chunk, which the loss is taken over: it holds about ten float32 tensors of this size."""

    @classmethod
    def of(cls, device: torch.device, logits: int | None = None) -> "ChunkSizes":
        """Return the sizes on a device; those of chunks of `logits` where that is given."""
        if device.type == "cuda":
            return cls.on_gpu(torch.cuda.get_device_properties(device).total_memory, logits)
        return ON_CPU if logits is None else cls(logits, max(1, logits // PARTS))

    @classmethod
    def on_gpu(cls, memory: float, logits: int | None = None) -> "ChunkSizes":
        """Return the sizes on a GPU with `memory` bytes: one part a chunk.

        A kernel takes some microseconds to launch, in which an H100 works through 10⁷ logits. So chunks are as large as
        memory allows: the ten tensors of one take a fifteenth of it. 2²⁷ of 80 GiB, 880 positions of 152k tokens.
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
    """Return slices of `size` each, at least 1, over `count`; a single empty one of none."""
    size = max(1, size)
    return [slice(start, start + size) for start in range(0, max(count, 1), size)]
