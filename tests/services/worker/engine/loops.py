"""Engine loops with a mock engine, and what tests run in them."""

from services.worker.core.scheduling.schedule import SchedulerConfig
from services.worker.core.scheduling.sequence import ActiveSequence
from services.worker.device.completion import LANDED
from services.worker.engine.loop import EngineLoop, StepOutput
from services.worker.engine.mock.mock_engine import MockEngine
from services.worker.engine.mock.tokens import next_token
from shared.messages.generation import SamplingParams

NUM_BLOCKS, BLOCK_SIZE = 16, 4


class CountingEngine(MockEngine):
    """Each step embeds one batch."""

    num_steps = 0

    def embed(self, batch):
        self.num_steps += 1
        return super().embed(batch)


def make_loop(engine=None, clock=lambda: 0.0, **changes):
    engine = engine or CountingEngine(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, verify=True)
    return EngineLoop(engine, SchedulerConfig(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, **changes), clock)


def request(name, prompt=(1, 2, 3, 4, 5), max_tokens=6, output=(), **params):
    sampling = SamplingParams(max_tokens=max_tokens, seed=1, **params)
    return ActiveSequence(request_id=name, attempt=0, gateway_id="g", prompt=prompt, params=sampling, output=output)


def expected(prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def run_all(loop):
    tokens, endings = {}, {}
    while loop.has_work:
        for out in loop.step().outputs:
            assert out.request_id not in endings
            assert out.offset == len(tokens.setdefault(out.request_id, []))
            tokens[out.request_id] += out.token_ids
            if out.finish_reason:
                endings[out.request_id] = out
    return tokens, endings


class Partial:
    """Partial work that runs layers which the test puts there."""

    num_requests = 0
    queued = (0, 0)
    decode_interval_s = 1e9

    def __init__(self, layers=0):
        self.layers, self.num_ran, self.num_own_layers, self.told = layers, 0, 0, []
        self.on_step = lambda: None
        self.begun_s = 0.0

    @property
    def ready(self):
        return self.layers > 0

    def attach(self, loop):
        self.loop = loop
        loop.partial = self
        return self

    def step(self):
        if not self.layers:
            return
        self.layers -= 1
        self.num_ran += 1
        self.on_step()
        self.loop.launch_part(LANDED, (), lambda _: StepOutput(()), begun_s=self.begun_s)

    def ran_layer(self):
        self.num_own_layers += 1

    def stepped(self, output):
        self.told.append(output)
