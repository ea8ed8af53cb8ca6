"""A process group for one call: how the rows of one optimizer step are spread over ranks (torch's gloo, on one machine)."""

import contextlib
import os
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def joined(group: dict | None) -> Iterator[Callable]:
    """Joins a process group and leaves it again.

    Args:
        group: {"rank": this process's number, "ranks": how many there are, "store": path of a file that they share and that
            no other group has used}; None for a process that is alone.

    Yields:
        A function that averages a tensor over the ranks, as data-parallel trainers do with gradients.
    """
    if group is None:
        yield lambda tensor: tensor
        return
    import torch.distributed as dist

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the ranks are on one machine, which may have no other interface
    ranks = group["ranks"]
    store = dist.FileStore(group["store"], ranks)
    dist.init_process_group("gloo", store=store, rank=group["rank"], world_size=ranks)

    def average(tensor):
        summed = tensor.clone()
        dist.all_reduce(summed)
        return summed / ranks

    try:
        yield average
    finally:
        dist.destroy_process_group()
