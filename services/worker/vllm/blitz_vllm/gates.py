"""Other weights come into a started model while it computes: a forward pass waits before what has not come.

vLLM's layerwise reload takes a module apart, and puts it together again once all its weights are there; here a thread
does so, unit by unit, and each module that has weights of its own is behind a gate until then. What has none (rotary
tables, which all layers share, the scales of attention) stays as it is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from .weights_source import WeightsSource


STEPS = 16
"""In so many, about, weights come that are all there: vLLM looks through the whole model at the beginning of each."""


class _Modules:
    """As much of a model as vLLM's reload asks for."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._modules = tuple(modules)

    def modules(self) -> Iterator[torch.nn.Module]:
        return iter(self._modules)


class GatedLoad:
    """One load of a model's weights. Made and finished by the thread that computes, between two passes."""

    def __init__(self, model: Any, model_config: Any, source: WeightsSource) -> None:
        """The gates are shut from now on."""
        from vllm.model_executor.layers.attention import is_deferred_attention_layer
        from vllm.model_executor.layers.logits_processor import LogitsProcessor
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self._model, self._config, self._source = model, model_config, source
        owners: dict[int, torch.nn.Module] = {}
        self._gates: dict[torch.nn.Module, threading.Event] = {}
        self._tied: list[torch.nn.Module] = []
        """Whose weights are another module's."""
        for module in model.modules():
            own = [owners.setdefault(id(tensor), module) is module for tensor in module.parameters(recurse=False)]
            if own and not is_deferred_attention_layer(module):
                if all(own):
                    self._gates[module] = threading.Event()
                elif any(own):
                    raise ValueError(f"a {type(module).__name__} has some of its weights in common with another module")
                else:
                    self._tied.append(module)
        self._all = threading.Event()
        """All weights are there, and what is made of them."""
        self._error: BaseException | None = None
        self._expected = {name for name, _ in model.named_parameters()}
        self._names = {id(module): name for name, module in model.named_modules()}
        initialize_layerwise_reload(_Modules(self._gates))
        self._hooks = [module.register_forward_pre_hook(self._gate(gate)) for module, gate in self._gates.items()]
        # The head's weights are used by another module than the one that has them.
        self._hooks += [
            module.register_forward_pre_hook(self._gate(self._all))
            for module in model.modules()
            if isinstance(module, LogitsProcessor) or module in self._tied
        ]
        self._thread = threading.Thread(target=self._load, name="weights", daemon=True)

    def start(self) -> None:
        """Weights come in from now on."""
        self._thread.start()

    def _gate(self, opened: threading.Event) -> Callable[..., None]:
        def wait(*_: object) -> None:
            opened.wait()
            if self._error is not None:
                raise RuntimeError("the weights did not come") from self._error

        return wait

    def _load(self) -> None:
        import torch

        try:
            with torch.no_grad():
                self._take_all()
            self._source.end()
        except BaseException as error:  # noqa: BLE001 - nobody must wait at a gate for ever
            self._error = error
        finally:
            self._source.close()
            for gate in (*self._gates.values(), self._all):
                gate.set()

    def _take_all(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_processing
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        loaded: set[str] = set()
        shut = dict(self._gates)
        opened: set[str] = set()
        for tensors in self._source.units(max(1, self._source.num_units // STEPS)):
            names = set(self._model.load_weights(iter(tensors)) or ())
            if late := opened & {name.rpartition(".")[0] for name in names}:
                raise ValueError(f"weights of {min(late)} come in more than one unit")
            loaded |= names
            # Whole ones have been put together already; others have padding, which does not come.
            come = {module: get_layerwise_info(module) for module in shut}
            whole = [module for module, info in come.items() if info.load_numel or not info.can_load()]
            finalize_layerwise_processing(_Modules(whole), self._config)
            for module in whole:
                shut.pop(module).set()
                opened.add(self._names[id(module)])
        if missing := self._expected - loaded:
            raise ValueError(f"weights that did not come: {', '.join(sorted(missing)[:5])}")
        for module in self._tied:
            # It has the other's tensors, and what was made of the earlier ones.
            if (method := getattr(module, "quant_method", None)) is not None:
                method.process_weights_after_loading(module)

    def finish(self) -> None:
        """Wait for all of them, and take the gates away. Raises what went wrong."""
        self._thread.join()
        for hook in self._hooks:
            hook.remove()
        if self._error is not None:
            raise self._error
