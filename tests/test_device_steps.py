"""Steps counted on the device, as on a GPU: whatever comes between them, all is as when the host counts."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kivi_kv import KiviCache, KiviConfig, cache_for
from kivi_kv.integrations.transformers import GraphDecoder, cache_argument
from tiny_models import generate, left_padded, make_model, prompt

CONFIG = KiviConfig(4, 4, 32, residual_length=32, sink_length=3)


class Run:
    """A model over a cache, driven call by call, with the mask of all its tokens."""

    def __init__(self, on_device: bool, family: str = "llama", max_tokens: int = 500) -> None:
        self.model = make_model(family)
        self.cache: KiviCache = cache_for(self.model, CONFIG, max_tokens=max_tokens)
        self.cache.decode_on_device = on_device
        self.mask = torch.ones(0, 0)

    @torch.no_grad()
    def __call__(self, ids: Tensor, new: Tensor | None = None, masked: bool = True) -> Tensor:
        """Logits of these tokens; new: their columns of the mask, ones if None."""
        new = torch.ones_like(ids) if new is None else new
        self.mask = new if not self.mask.numel() else torch.cat([self.mask, new], dim=1)
        positions = (self.mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        options = {"attention_mask": self.mask, "position_ids": positions} if masked else {}
        return self.model(ids, **options, **cache_argument(self.cache)).logits

    def padded(self, lengths: list[int]) -> Tensor:
        inputs = left_padded(lengths)
        return self(inputs["input_ids"], inputs["attention_mask"])


def both(script: Callable[[Run], list[Tensor]], **options) -> None:
    """The script's tensors are the same either way, and so is what the caches hold in the end."""
    host, device = Run(False, **options), Run(True, **options)
    for a, b in zip(script(host), script(device), strict=True):
        assert a.shape == b.shape
        assert torch.allclose(a, b, atol=2e-3)
    for a, b in zip(host.cache.packed_layers, device.cache.packed_layers, strict=True):
        assert a.get_seq_length() == b.get_seq_length()
        assert (a.cache.lengths, a.cache.packed) == (b.cache.lengths, b.cache.packed)
        assert torch.allclose(a.keys, b.keys, atol=2e-3)


def steps(run: Run, count: int, batch: int, seed: int = 0) -> list[Tensor]:
    return [run(prompt(1, seed + i, batch)) for i in range(count)]


@pytest.mark.quick
@pytest.mark.parametrize("lengths", [[60], [40, 12, 29]], ids=str)
def test_chunks_between_steps(lengths):
    B = len(lengths)

    def script(run: Run) -> list[Tensor]:
        run.padded(lengths)
        return [*steps(run, 30, B), run(prompt(7, 50, B)), *steps(run, 140, B, 100), run(prompt(9, 9, B))]

    both(script)


@pytest.mark.quick
def test_rows_that_skip_a_token():
    """A finished row is masked; the others go on, on the device again."""

    def script(run: Run) -> list[Tensor]:
        run.padded([40, 12, 29])
        out = steps(run, 3, 3)
        for i in range(3):
            out.append(run(prompt(1, 30 + i, 3), torch.tensor([[1], [0], [1]]))[[0, 2]])
        return out + steps(run, 130, 3, 60) + [run(prompt(6, 90, 3))]

    both(script)


def test_a_prompt_token_by_token():
    """Padding comes one column at a time, too."""
    model, inputs = make_model("llama"), left_padded([40, 12, 29])
    caches = [cache_for(model, CONFIG, max_tokens=500) for _ in range(2)]
    caches[1].decode_on_device = True
    expected, actual = (
        generate(model, inputs, c, prefill_chunk_size=1, max_new_tokens=160, disable_compile=True) for c in caches
    )
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("lengths", [[40, 40], [40, 12]], ids=str)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.filterwarnings("ignore::kivi_kv.KiviWarning")
def test_another_attention_takes_over(attention, lengths, tokens):
    def script(run: Run) -> list[Tensor]:
        run.padded(lengths)
        steps(run, 4, 2)
        run.model.set_attn_implementation(attention)
        return [run(prompt(tokens, 70, 2))]

    host, device = script(Run(False)), script(Run(True))
    assert torch.allclose(host[0], device[0], atol=2e-3)


@pytest.mark.parametrize("hidden", [None, 42])
@pytest.mark.filterwarnings("ignore::kivi_kv.KiviWarning")
def test_a_mask_of_the_users_own(hidden):
    """4D, over all tokens: attended as it says, by the dequantized values if it is more than padding."""

    def script(run: Run) -> list[Tensor]:
        run.padded([40, 12])
        steps(run, 4, 2)
        mask = torch.cat([run.mask, torch.ones(2, 1)], dim=1).bool()[:, None, None]
        if hidden is not None:
            mask[..., hidden] = False
        options = {"attention_mask": mask, "position_ids": torch.tensor([[44], [16]])}
        with torch.no_grad():
            return [run.model(prompt(1, 5, 2), **options, **cache_argument(run.cache)).logits]

    assert torch.allclose(script(Run(False))[0], script(Run(True))[0], atol=2e-3)


@pytest.mark.parametrize("on_device", [False, True])
def test_a_padded_batch_must_come_with_its_mask(on_device):
    run = Run(on_device)
    run.padded([40, 12])
    steps(run, 3, 2)
    with pytest.raises(ValueError, match=r"^attention_mask: expected the padding that earlier tokens were stored"):
        run(prompt(1, 5, 2), masked=False)


@pytest.mark.parametrize("lengths", [[60], [40, 12, 29]], ids=str)
def test_what_the_host_is_told_between_steps(lengths):
    def told(run: Run) -> list:
        run.padded(lengths)
        steps(run, 4, len(lengths))
        cache = run.cache
        return [cache.get_seq_length(), cache.dense_nbytes, cache.stats()["tokens"], cache.layers[0].keys.shape]

    assert told(Run(True)) == told(Run(False))


def test_another_batch_after_reset():
    def script(run: Run) -> list[Tensor]:
        run.padded([40, 12, 29])
        steps(run, 3, 3)
        run.cache.reset()
        run.mask = torch.ones(0, 0)
        return [run(prompt(1, 3, 2), torch.ones(2, 1, dtype=torch.long)), *steps(run, 5, 2)]

    both(script)


def test_gradients_do_without():
    """They flow through a step that the host counts; the device's has none."""
    run = Run(True)
    run.padded([40])
    logits = run.model(prompt(1, 1), **cache_argument(run.cache)).logits
    logits.sum().backward()
    assert not run.cache.packed_layers[0].on_device


def test_a_model_of_fewer_layers_than_its_config():
    run = Run(True)
    run.model.model.layers = run.model.model.layers[:1]
    run.padded([40])
    steps(run, 3, 1)
    assert run.cache.get_seq_length() == 43


def test_room_is_counted_without_masks():
    """A model that is given its masks ready makes none, so nobody asks for their sizes."""
    run = Run(True, "qwen2", max_tokens=60)
    run.padded([50])
    steps(run, 2, 1)

    @torch.no_grad()
    def step(i: int) -> None:
        options = {"attention_mask": {"full_attention": None}, "position_ids": torch.tensor([[52 + i]])}
        run.model(prompt(1, i), **options, **cache_argument(run.cache))

    for i in range(8):
        step(i)
    with pytest.raises(ValueError, match=r"^max_tokens: the cache holds 60 tokens a row, got 61$"):
        step(8)
    assert run.cache.get_seq_length() == 60


def test_what_is_no_longer_compiled():
    run = Run(True)
    run.padded([40])
    assert run.cache.is_compileable
    run.cache.crop(-3)
    assert not run.cache.is_compileable
    other = Run(False)
    assert not other.cache.is_compileable


class Replay:
    """What a CUDA graph does: the step's work, while the host learns nothing of it."""

    def __init__(self, decoder: GraphDecoder) -> None:
        self.decoder = decoder

    def replay(self) -> None:
        layers = self.decoder.held
        known = [(x._known, x._decoded_by) for x in layers]
        room = self.decoder.cache._room
        self.decoder.step()
        self.decoder.cache._room = room
        for layer, (states, by) in zip(layers, known, strict=True):
            layer._known, layer._decoded_by = states, by


@pytest.mark.quick
def test_a_graph_that_is_kept():
    """Calls that consist of replays alone are counted, and refused when the cache is full."""
    run = Run(True, max_tokens=90)
    run(prompt(40, 0, 3), masked=False)
    decoder = GraphDecoder(run.model, run.cache)
    token = decoder.generate(torch.tensor([1, 2, 3]), 10)[:, -1]
    decoder.graph, decoder._captured = Replay(decoder), decoder._addresses()
    token = decoder.generate(token, 20)[:, -1]
    held = run.cache.packed_layers[0].cache
    assert held.lengths == held.storage.lengths.tolist() == [70] * 3
    assert run.cache.get_seq_length() == 70
    assert run.cache.stats()["attend_calls"] == {"reference": 2 * 30}
    with pytest.raises(ValueError, match=r"^tokens: expected from 1 to the 20 that max_tokens leaves, got 21$"):
        decoder.generate(token, 21)
    decoder.generate(token, 20)
    assert run.cache.get_seq_length() == 90


def test_a_decoder_after_reset():
    """The cache may hold another batch then, in other storage."""
    run = Run(True)
    run(prompt(40, 0, 3), masked=False)
    decoder = GraphDecoder(run.model, run.cache)
    decoder.generate(torch.tensor([1, 2, 3]), 5)
    with torch.no_grad():
        for batch in (2, 3):
            run.cache.reset()
            run.model(prompt(50, 7, batch), **cache_argument(run.cache))
            fresh = cache_for(run.model, CONFIG, max_tokens=500)
            run.model(prompt(50, 7, batch), **cache_argument(fresh))
            token = torch.arange(batch) + 5
            expected = GraphDecoder(run.model, fresh).generate(token, 30)
            assert torch.equal(decoder.generate(token, 30), expected)
    run.model.set_attn_implementation("sdpa")
    with pytest.raises(
        ValueError, match=r"^model: expected the attention 'kivi', which cache_for sets, got 'sdpa'$"
    ):
        GraphDecoder(run.model, run.cache)


@pytest.mark.parametrize("max_tokens", [None, 700])
@pytest.mark.parametrize("lengths", [[300, 300, 60, 60], [300, 300, 40, 60]], ids=str)
def test_rows_that_were_moved_keep_their_pages_apart(lengths, max_tokens):
    """Rows that pack the same page in turn, after a reorder gave their places to others."""
    order = torch.tensor([2, 0, 3, 1])
    model, inputs = make_model("llama"), left_padded(lengths)
    caches = [cache_for(model, CONFIG, max_tokens=max_tokens) for _ in range(2)]
    mask = inputs["attention_mask"]
    with torch.no_grad():
        for i in range(130):
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            ids = inputs["input_ids"] if i == 0 else prompt(1, i, 4)
            new = positions[:, -ids.shape[1] :]
            a = model(ids, attention_mask=mask, position_ids=new, **cache_argument(caches[0])).logits
            rows = order if i else slice(None)
            b = model(
                ids[rows], attention_mask=mask[rows], position_ids=new[rows], **cache_argument(caches[1])
            ).logits
            assert torch.allclose(a[rows][:, -1], b[:, -1], atol=2e-3)
            if i == 0:
                caches[1].reorder_cache(order)
            mask = torch.cat([mask, mask.new_ones(4, 1)], dim=1)
    table = caches[1].packed_layers[0].cache.storage.table
    packed = caches[1].packed_layers[0].cache.packed
    for page in range(max(packed)):
        slots = [int(table[row, page]) for row in range(4) if packed[row] > page]
        assert len(set(slots)) == len(slots)


def test_rows_that_were_moved_decode_apart():
    order = torch.tensor([0, 2, 3, 1])
    model, inputs = make_model("llama"), left_padded([300, 300, 40, 60])
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    caches = [cache_for(model, CONFIG, max_tokens=700) for _ in range(2)]
    with torch.no_grad():
        for cache in caches:
            model(**inputs, position_ids=positions, **cache_argument(cache))
    caches[1].reorder_cache(order)
    token = torch.tensor([5, 6, 7, 8])
    expected = GraphDecoder(model, caches[0]).generate(token, 140)
    assert torch.equal(GraphDecoder(model, caches[1]).generate(token[order], 140), expected[order])
