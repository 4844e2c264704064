"""
A CUDA device on which nothing runs: fake tensors, and Inductor stopped where it would launch a kernel.

Only in a process that has environment.py's variables. What is patched here are inner parts of torch, so
another version is refused (environment.py) rather than compiled in some other way than it would be.
"""

import functools
import logging

import torch
import torch._dynamo as dynamo
import torch._dynamo.repro.after_aot as after_aot
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch._subclasses.fake_tensor as fake_tensor
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import compile_fx, metrics
from torch._inductor.graph import GraphLowering, getattr_recursive
from torch._inductor.ir import Constant
from torch._inductor.lowering import tensor as lower_tensor
from torch._inductor.runtime import triton_heuristics
from torch.utils._mode_utils import no_dispatch

from nanoheads import attention


class Seen:
    """What compiling has shown since clear()."""

    def __init__(self):
        self.shared = {}  # kernel -> bytes of shared memory that it asks for
        self.graphs = 0   # that Dynamo has handed to a compiler

    def clear(self):
        self.shared.clear()
        self.graphs = 0
        dynamo.reset()
        counters.clear()
        metrics.reset()
        attention.compiled_flex.cache_clear()

    def breaks(self):
        """Why Dynamo has cut the model in parts, a line each."""
        return sorted({" ".join(reason.split())[:160] for reason in counters["graph_break"]})


SEEN = Seen()


def shared_memory_limit():
    """Bytes of shared memory that a block may ask for on this card."""
    return torch.cuda.get_device_properties(0).shared_memory_per_block_optin


def compile_kernel(tuner, *args, **kwargs):
    """In place of CachingAutotuner.precompile: down to the card's binary, but not loaded.

    Of several configurations those that fit are taken on a GPU. So the first that fits is enough here, and a
    kernel is too large where none does.
    """
    name = tuner.inductor_meta.get("kernel_name") or tuner.fn.__name__
    least, error = None, None
    for config in tuner.configs:
        try:
            shared = tuner._precompile_config(config).kernel.metadata.shared
        except (triton_heuristics.OutOfResources, triton_heuristics.PTXASError) as e:
            error = e
            continue
        least = shared if least is None else min(least, shared)
        if least <= shared_memory_limit():
            break
    if least is None:
        raise error or triton_heuristics.NoTritonConfigsError(f"{name} has no configuration")
    SEEN.shared[name] = max(SEEN.shared.get(name, 0), least)


def lower_constant(lowering, target, args, kwargs, usual=GraphLowering.get_attr):
    """In place of GraphLowering.get_attr: a small constant made while tracing, which has no data, as ones."""
    value = getattr_recursive(lowering.module, target)
    if not (isinstance(value, torch.Tensor) and value.is_cuda):
        return usual(lowering, target, args, kwargs)
    if value.shape == ():
        return Constant(value=1.0 if value.dtype.is_floating_point else 1, dtype=value.dtype,
                        device=value.device)
    if lowering.can_inline_constant(value):
        with no_dispatch():
            ones = torch.ones(value.shape, dtype=value.dtype).tolist()
        return lower_tensor(ones, dtype=value.dtype, device=value.device)
    return lowering.add_tensor_constant(value, target)


def inductor(graph, inputs):
    """A backend of torch.compile: Inductor compiles, and the graph goes on with fake tensors."""
    SEEN.graphs += 1
    compile_fx.compile_fx(graph, inputs)
    return graph.forward


def no_compiler(graph, inputs):
    """A backend of torch.compile that leaves it at Dynamo's graph."""
    SEEN.graphs += 1
    return graph.forward


def prepare():
    """Patch torch in this process."""
    fake_tensor.init_gpu_context = lambda *args, **kwargs: None
    torch.autograd.set_multithreading_enabled(False)  # a thread of the device's would ask it for a stream
    torch.cuda.set_rng_state = lambda *args, **kwargs: None
    torch.cuda.get_rng_state = lambda *args, **kwargs: torch.zeros(16, dtype=torch.uint8)
    torch.cuda.manual_seed = lambda seed: None
    after_aot.save_graph_repro = lambda *args, **kwargs: None
    after_aot.generate_compiler_repro_string = lambda *args, **kwargs: ""
    GraphLowering.get_attr = lower_constant
    triton_heuristics.CachingAutotuner.precompile = compile_kernel

    functorch_config.enable_autograd_cache = False
    functorch_config.force_non_lazy_backward_lowering = True  # the backward pass is compiled at once
    inductor_config.compile_threads = 1
    inductor_config.fx_graph_cache = False
    inductor_config.use_static_triton_launcher = False
    inductor_config.joint_graph_constant_folding = False  # computes on the device
    inductor_config.shape_padding = False                 # measures on the device
    inductor_config.triton.unique_kernel_names = False    # the same in all models: triton's cache finds them

    log = compile_fx.inductor_metrics_log  # Inductor counts bytes only for those who listen
    log.setLevel(logging.INFO)
    log.propagate = False
    log.addHandler(logging.NullHandler())


def compile_with(backend):
    """Have torch.compile, called from our code, use a backend; FlexAttention outside a graph does too."""
    real = torch.compile.__wrapped__ if hasattr(torch.compile, "__wrapped__") else torch.compile

    @functools.wraps(real)
    def compiled(model=None, **options):
        options.pop("mode", None)  # goes with Inductor's own backend only
        return real(model, **{**options, "backend": backend})

    torch.compile = compiled
    attention.compiled_flex.cache_clear()


def to_cuda(model):
    """The same model with its parameters and buffers on the card, shared ones shared."""
    moved = {}

    def move(tensor):
        if id(tensor) not in moved:
            new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, tensor.requires_grad)
            moved[id(tensor)] = new
        return moved[id(tensor)]

    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            tensors.update({name: move(t) for name, t in tensors.items() if t is not None})
    return model
