"""The list: which names of Megatron are replaced on a CPU, and why. Imports neither torch nor Megatron."""

from typing import Final

from verl_engine.contract.backend import DeclaredPatch

_CORE: Final = "megatron.core"

USERS_OF_TORCH: Final = {
    "distributed.param_and_grad_buffer": "buffers of weights and gradients",
    "models.common.embeddings.rotary_pos_embedding": "the frequencies of rotary positions",
    "optimizer.clip_grads": "sums of the gradient's norm and of its zeros",
    "optimizer.grad_scaler": "the loss scale of float16",
    "optimizer.optimizer": "the flag of gradients that are not finite",
    "pipeline_parallel.p2p_communication": "activations and gradients that another stage sends, and their shapes",
    "pipeline_parallel.schedules": "counts of tokens",
    "tensor_parallel.layers": "weights, and inputs gathered along the sequence",
    "tensor_parallel.mappings": "what is gathered or scattered among tensor-parallel ranks",
    "tensor_parallel.random": "states of the random number generator that dropout takes",
    "tensor_parallel.utils": "activations gathered after they were kept in parts",
    "transformer.moe.router": "counts of tokens for each expert",
    "transformer.moe.shared_experts": "a stream of their own",
    "transformer.moe.token_dispatcher": "a stream for the counts of tokens",
    "utils": "buffers that many calls share, such as those of inputs gathered along the sequence",
}
"""Modules below ``megatron.core`` that ask torch for a CUDA device, and what for."""

TORCH_PATCHES: Final = tuple(
    DeclaredPatch(f"{_CORE}.{module}:torch", f"asks for a CUDA device: {purpose}")
    for module, purpose in USERS_OF_TORCH.items()
)
"""These modules get `verl_megatron_mindspeed.cpu_support.torch_on_cpu` under the name ``torch``."""

TENSOR_PATCHES: Final = (
    DeclaredPatch(
        f"{_CORE}.optimizer.clip_grads:clip_grad_by_total_norm_fp32",
        "asserts that gradients are of the type torch.cuda.FloatTensor",
    ),
    DeclaredPatch(
        f"{_CORE}.optimizer.optimizer:Float16OptimizerWithFloat16Params.__init__",
        "sorts parameters by types such as torch.cuda.HalfTensor, and refuses others",
    ),
    DeclaredPatch(
        f"{_CORE}.optimizer.distrib_optimizer:DistributedOptimizer.__init__",
        "sorts parameters by types such as torch.cuda.HalfTensor, and refuses others",
    ),
    DeclaredPatch(
        f"{_CORE}.models.common.language_module.language_module:LanguageModule.setup_embeddings_and_output_layer",
        "moves tied embeddings of the first and last pipeline stage by Tensor.cuda()",
    ),
)
"""These functions run while methods of tensors behave as on CUDA; see
`verl_megatron_mindspeed.cpu_support.tensors_like_cuda`."""

GET_RANDOM_PATCH: Final = DeclaredPatch(
    f"{_CORE}.tensor_parallel.random:_get_cuda_rng_state", "takes the state of a CUDA device's generator"
)
SET_RANDOM_PATCH: Final = DeclaredPatch(
    f"{_CORE}.tensor_parallel.random:_set_cuda_rng_state",
    "puts off setting a state until CUDA is initialized, which never happens",
)
DISPATCH_PATCH: Final = DeclaredPatch(
    f"{_CORE}.transformer.moe.moe_utils:maybe_move_tensor_to_cpu",
    "leaves what is on the CPU as a tensor where its callers count on numpy",
)
ROUTER_PATCH: Final = DeclaredPatch(
    f"{_CORE}.transformer.moe.moe_utils:router_gating_linear",
    "asks whether te_general_gemm is there, a name that 0.16 only has together with Transformer Engine",
)
PATCHES: Final = (*TORCH_PATCHES, *TENSOR_PATCHES, GET_RANDOM_PATCH, SET_RANDOM_PATCH, DISPATCH_PATCH, ROUTER_PATCH)
"""All of them."""
