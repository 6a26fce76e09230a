"""Which local rank does a worker get, and which devices does it see?"""

from collections.abc import Sequence

__all__ = ["seat"]


def seat(device: int, devices: Sequence[int], visible: str | None) -> dict[str, str]:
    """Variables of the worker on `device` of a node that uses `devices`.

    Local ranks count from 0 without a gap, as torchrun promises, and scripts take them for numbers
    of devices: where one rests, the others alone are visible.

    Args:
        device: number of the worker's device, from 0, among those the agent sees.
        devices: numbers of all devices that workers of this node use.
        visible: `CUDA_VISIBLE_DEVICES` of the agent.
    """
    used = sorted(devices)
    variables = {"LOCAL_RANK": str(used.index(device))}
    if used != list(range(len(used))):
        names = visible.split(",") if visible else [str(number) for number in range(used[-1] + 1)]
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(names[number] for number in used)
    return variables
