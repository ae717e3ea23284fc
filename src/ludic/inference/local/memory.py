"""How much memory is free."""

from pathlib import Path

import torch


def free_memory(device: torch.device) -> int:
    """Bytes that could be allocated on this device now."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 4 << 30
