"""A plugin of vLLM's that mends its CPU build: found by its `.dist-info`, where this folder is in PYTHONPATH.

vLLM 0.32 spreads each row's temperature over the row's drafted tokens by a kernel, which its CPU build has in C++. That
one takes int64 alone: floats are converted first, and the result stays in the copy. So drafted tokens are verified at a
temperature out of memory that nobody wrote, in all rows of a batch in which one is sampled, greedy ones too.
"""

import torch


def expand(output, values, ends, replace_from, replace_to, MAX_NUM_TOKENS=None):
    counts = torch.diff(ends, prepend=ends.new_zeros(1)).long()
    output.copy_(values.masked_fill(values == replace_from, replace_to).repeat_interleave(counts))


def mend():
    from vllm.utils import cpu_triton_utils

    cpu_triton_utils._expand_kernel_impl = expand
