"""Sends callers of ``torch.cuda`` to the NPU, for code that knows no other device."""

import torch

from torch_npu import npu

torch.cuda.current_device = npu.current_device
torch.cuda.device_count = npu.device_count
torch.cuda.set_device = npu.set_device
torch.cuda.synchronize = npu.synchronize
