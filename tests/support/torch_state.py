"""What of torch's state in this process a test could leave changed for the next one."""

from __future__ import annotations

import sys


def state_of_torch() -> dict[str, object]:
    """Returns the ambient state, name to value; nothing where torch is not imported yet."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_float32_matmul_precision"):
        return {}
    switches = (torch.backends, torch.backends.cuda.matmul, torch.backends.mkldnn.matmul, torch.backends.cudnn.conv)
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:
        precision = "mixed"
    return {
        "precision": (precision, *(owner.fp32_precision for owner in switches)),
        "default dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "default device": getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None) and torch.get_default_device(),
    }
