"""Makes torch know the device ``npu``, as the original does; there are two, and they compute nothing."""

import torch
from torch.utils.backend_registration import rename_privateuse1_backend

from torch_npu import npu

rename_privateuse1_backend("npu")
torch._register_device_module("npu", npu)
