"""vLLM's loader of weights that a worker has, or receives meanwhile (``--load-format blitz``), and how other weights
come into a model that is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any

from .gates import GatedLoad
from .weights_source import WeightsSource

FORMAT = "blitz"


def register() -> None:
    """Make the format known to vLLM, in this process."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class BlitzModelLoader(BaseModelLoader):
        """``model_loader_extra_config``: ``{"socket": PATH}``."""

        def download_model(self, model_config: object) -> None:
            """Nothing: the worker has them."""

        def load_weights(self, model: Any, model_config: Any) -> None:
            source = _load(model, model_config, self.load_config.model_loader_extra_config["socket"])
            if source is not None:
                source.end()

    register_model_loader(FORMAT)(BlitzModelLoader)


def _load(model: Any, model_config: Any, socket_path: str) -> WeightsSource | None:
    """All weights, as they come, from a source that is to be ended; without a socket, some that mean nothing. Raises
    ``ConnectionError`` where they do not come, ``ValueError`` where some are missing."""
    from vllm.config import LoadConfig
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    # Of tied ones one is named, and both as long as a refill has taken the model apart.
    expected = model.__dict__.setdefault("_blitz_expected", frozenset(name for name, _ in model.named_parameters()))
    if not socket_path:
        DummyModelLoader(LoadConfig(load_format="dummy")).load_weights(model, model_config)
        return None
    source = WeightsSource(socket_path)
    try:
        loaded = model.load_weights(chain.from_iterable(source.units()))
        missing = expected - set(loaded or ())
        # As vLLM's own loader: methods of quantisation have parameters that no checkpoint has.
        if loaded is not None and missing and model_config.quantization is None:
            raise ValueError(f"weights that did not come: {', '.join(sorted(missing)[:5])}")
    except BaseException:
        source.close()
        raise
    return source


def register_refill() -> None:
    """Make known to vLLM, in this process, how other weights come into a model that is loaded."""
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    @dataclass
    class Nothing(WeightTransferInitInfo):
        pass

    @dataclass
    class From(WeightTransferUpdateInfo):
        socket: str
        early: bool = False

    class BlitzWeightTransfer(WeightTransferEngine):
        """A layer of the model is made anew once all its weights are there, and takes the place of what was there."""

        init_info_cls = Nothing
        update_info_cls = From
        gated: GatedLoad | None = None
        source: WeightsSource | None = None
        """Until what came has its place: some modules keep views of it until then."""

        def init_transfer_engine(self, init_info: Nothing) -> None:
            """Nothing: the worker says where its weights are."""

        def start_weight_update(self) -> None:
            """Nothing: what is done follows from how the weights come."""

        def update_weights(self, update_info: dict[str, Any]) -> None:
            # Without vLLM's synchronisation of an accelerator: on CPUs there is none.
            self.receive_weights(self.parse_update_info(update_info))
            if self.device.type != "cpu":
                import torch

                torch.accelerator.synchronize()

        def receive_weights(self, update_info: From) -> None:
            if update_info.early:
                self.gated = GatedLoad(self.model, self.model_config, WeightsSource(update_info.socket))
                self.gated.start()
                return
            initialize_layerwise_reload(self.model)
            self.source = _load(self.model, self.model_config, update_info.socket)

        def finish_weight_update(self) -> None:
            gated, self.gated = self.gated, None
            if gated is not None:
                gated.finish()
                return
            tied = [module for module in self.model.modules() if _has_none_of_its_own(get_layerwise_info(module))]
            finalize_layerwise_reload(self.model, self.model_config)
            for module in tied:
                # It has the other's tensors, and what was made of the earlier ones.
                if (method := getattr(module, "quant_method", None)) is not None:
                    method.process_weights_after_loading(module)
            source, self.source = self.source, None
            if source is not None:
                source.end()

        def shutdown(self) -> None:
            """Nothing is held between two updates."""

    WeightTransferEngineFactory.register_engine(FORMAT, BlitzWeightTransfer)


def _has_none_of_its_own(info: Any) -> bool:
    return bool(info.can_load() and info.load_numel <= 0 < info.load_numel_total)
