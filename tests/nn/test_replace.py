"""`swap`: what it replaces, what it keeps, and that torch's models really call what it put there."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from regard.errors import ConfigurationError
from regard.nn import Linear, MultiheadAttention, SwapReport, swap, swap_linear

BATCH, TOKENS, DIM = 3, 7, 8
PADDED = torch.arange(TOKENS) >= torch.tensor([[7], [4], [2]])
pytestmark = [
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]
anything: Any = swap  # which may be given what it does not take


def encoder(**options: Any) -> Any:
    layer = nn.TransformerEncoderLayer(DIM, 2, 16, **{"batch_first": True, "dropout": 0.0, **options})
    return nn.TransformerEncoder(layer, 2)


def of_torch(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module) is nn.MultiheadAttention]


@pytest.fixture
def calls(monkeypatch) -> Callable[[type[nn.Module]], list[nn.Module]]:
    """Which modules of a class are called; no hook, for torch's encoder layer looks for hooks."""

    def count(kind: type[nn.Module]) -> list[nn.Module]:
        seen: list[nn.Module] = []
        forward = kind.forward

        def noted(self: nn.Module, *given: Any, **options: Any) -> Any:
            seen.append(self)
            return forward(self, *given, **options)

        monkeypatch.setattr(kind, "forward", noted)
        return seen

    return count


class TestWhatIsReplaced:
    def test_any_depth(self):
        model = nn.Transformer(DIM, 2, 2, 3, 16)
        done = swap(nn.ModuleDict({"inner": nn.Sequential(nn.Linear(1, 1), model)}))
        assert of_torch(done.model) == []
        assert len(done.replaced) == 2 + 2 * 3
        assert done.replaced[0] == "inner.1.encoder.layers.0.self_attn"
        assert done.replaced[-1] == "inner.1.decoder.layers.2.multihead_attn"
        assert all(type(done.model.get_submodule(name)) is MultiheadAttention for name in done.replaced)
        assert done.model["inner"][1] is model  # type: ignore[index]
        assert not done.skipped

    def test_the_model_itself(self):
        theirs = nn.MultiheadAttention(DIM, 2)
        done = swap(theirs)
        assert type(done.model) is MultiheadAttention
        assert type(theirs) is nn.MultiheadAttention
        assert done.replaced == ("",)
        assert "replaced the model itself" in str(done)
        x = torch.randn(TOKENS, BATCH, DIM)
        torch.testing.assert_close(done.model(x, x, x), theirs(x, x, x))

    def test_parameters_are_the_very_same(self):
        model = encoder()
        before = dict(model.named_parameters())
        optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        swap(model)
        assert list(before) == [name for name, _ in model.named_parameters()]
        assert all(parameter is before[name] for name, parameter in model.named_parameters())
        assert all(tensor.equal(state[name]) for name, tensor in model.state_dict().items())
        model(torch.randn(BATCH, TOKENS, DIM)).square().sum().backward()
        optimiser.step()
        assert not model.layers[0].self_attn.in_proj_weight.equal(state["layers.0.self_attn.in_proj_weight"])

    @pytest.mark.parametrize(
        "options", [{"kdim": 5, "vdim": 6}, {"bias": False}, {"add_bias_kv": True, "add_zero_attn": True}], ids=str
    )
    def test_every_kind_of_layer(self, options):
        theirs = nn.MultiheadAttention(DIM, 2, **options)
        tensors = [torch.randn(TOKENS, BATCH, dim) for dim in (DIM, theirs.kdim, theirs.vdim)]
        torch.testing.assert_close(swap(theirs).model(*tensors), theirs(*tensors))

    def test_shared_layers_stay_shared(self):
        shared = nn.MultiheadAttention(DIM, 2)
        block = nn.ModuleDict({"attn": shared})
        model = nn.ModuleList([shared, block, block, nn.MultiheadAttention(DIM, 2)])
        done = swap(model)
        assert done.replaced == ("0", "1.attn", "2.attn", "3")
        assert model[0] is model[1]["attn"] is model[2]["attn"]  # type: ignore[index]
        assert model[0] is not model[3]
        assert of_torch(model) == []

    def test_what_was_set_on_it(self):
        model = encoder(dropout=0.3)
        model.eval()
        model.layers[1].train()
        attention = model.layers[0].self_attn
        attention.note = "kept"
        attention.register_buffer("numbers", torch.arange(3))
        attention.in_proj_weight.requires_grad_(False)
        swap(model)
        new = model.layers[0].self_attn
        assert (new.training, model.layers[1].self_attn.training) == (False, True)
        assert (new.note, new.dropout, new.batch_first) == ("kept", 0.3, True)
        assert new.numbers.equal(torch.arange(3))
        assert not new.in_proj_weight.requires_grad
        new.in_proj_weight = nn.Parameter(torch.zeros(24, 8))
        assert attention.in_proj_weight is not new.in_proj_weight

    def test_many_that_are_left_are_not_all_spelled_out(self):
        said = str(swap_linear(nn.Sequential(*(nn.LazyLinear(1) for _ in range(30)))))
        assert said.splitlines()[0] == "0 of 30 nn.Linear replaced by regard.nn.Linear"
        assert said.splitlines()[-1] == "  and 18 more"

    def test_hooks_come_along(self):
        model = encoder()
        seen = []
        handle = model.layers[0].self_attn.register_forward_hook(lambda module, given, output: seen.append(module))
        done = swap(model)
        assert "layers.0.self_attn: preserved 1 hook" in done.notes
        x = torch.randn(BATCH, TOKENS, DIM)
        model(x)
        assert seen == [model.layers[0].self_attn]
        handle.remove()
        model(x)
        assert len(seen) == 1

    def test_twice_is_once(self):
        model = encoder()
        swap(model)
        first = list(model.modules())
        done = swap(model)
        assert list(model.modules()) == first
        assert (done.replaced, dict(done.skipped), done.notes) == ((), {}, ())
        assert str(done) == "0 of 0 nn.MultiheadAttention replaced by regard.nn.MultiheadAttention"
        assert [len(layer.self_attn._forward_pre_hooks) for layer in model.layers] == [1, 1]

    def test_a_model_without_attention(self):
        model = nn.Linear(2, 2)
        done = swap(model)
        assert done.model is model
        assert done.replaced == ()

    def test_no_random_number_is_drawn(self):
        model = encoder()
        before = torch.get_rng_state()
        swap(model)
        assert torch.get_rng_state().equal(before)


class OwnMeaning(nn.MultiheadAttention):
    """A subclass."""


class TestWhatIsLeft:
    def test_subclasses(self):
        model = nn.ModuleList([OwnMeaning(DIM, 2), nn.MultiheadAttention(DIM, 2)])
        done = swap(model)
        assert type(model[0]) is OwnMeaning
        assert done.replaced == ("1",)
        assert list(done.skipped) == ["0"]
        assert done.skipped["0"].endswith("OwnMeaning, a subclass with a meaning of its own")

    def test_layers_that_are_more_than_their_class(self):
        model: Any = nn.ModuleDict({name: nn.MultiheadAttention(DIM, 2) for name in ("patched", "compiled", "loading")})
        model["patched"].forward = lambda *given: given
        model["compiled"].compile(backend="eager")
        model["loading"].register_load_state_dict_pre_hook(lambda *given: None)
        model["outside"] = torch.compile(nn.MultiheadAttention(DIM, 2), backend="eager")
        done = swap(model)
        assert done.replaced == ()
        assert dict(done.skipped) == {
            "patched": "its forward was replaced on the instance",
            "compiled": "it is compiled: swap first, then compile",
            "loading": "it has hooks for load_state_dict, which refer to this object: swap first, then register them",
            "outside._orig_mod": "it is compiled: swap first, then compile",
        }

    def test_it_says_so(self):
        model = nn.ModuleDict({"a": OwnMeaning(DIM, 2), "b": encoder()})
        done = swap(model)
        assert isinstance(done, SwapReport)
        where = f"{OwnMeaning.__module__}.OwnMeaning"
        assert str(done).splitlines() == [
            "2 of 3 nn.MultiheadAttention replaced by regard.nn.MultiheadAttention",
            "  replaced b.layers.0.self_attn",
            "  replaced b.layers.1.self_attn",
            f"  skipped a: it is {where}, a subclass with a meaning of its own",
            "  b: use_nested_tensor is False now",
        ]
        assert repr(done) == (
            "SwapReport(model=<ModuleDict>, kind='MultiheadAttention', "
            "replaced=['b.layers.0.self_attn', 'b.layers.1.self_attn'], "
            f"skipped={{'a': 'it is {where}, a subclass with a meaning of its own'}}, "
            "notes=['b: use_nested_tensor is False now'])"
        )

    @pytest.mark.parametrize(
        ("model", "has"), [("model", "a str"), (None, "a NoneType"), (nn.Linear, "the class Linear")]
    )
    def test_no_module(self, model, has):
        with pytest.raises(ConfigurationError, match=f"swap needs a torch.nn.Module, .*; this is {has}"):
            anything(model)


class TestInsideTorchsModels:
    @pytest.mark.parametrize("norm_first", [False, True])
    def test_evaluation_calls_what_was_put_there(self, calls, norm_first):
        """torch's encoder layer computes attention by itself, from the parameters; after swap it may not."""
        model = encoder(norm_first=norm_first, **({"activation": "gelu"} if norm_first else {})).eval()
        x = torch.randn(BATCH, TOKENS, DIM)
        of_theirs, of_ours = calls(nn.MultiheadAttention), calls(MultiheadAttention)
        with torch.no_grad():
            expected = model(x)
            assert of_theirs == []  # the bypass that there is to end
            swap(model)
            output = model(x)
        assert of_ours == [layer.self_attn for layer in model.layers]
        torch.testing.assert_close(output, expected, atol=1e-6, rtol=1e-5)

    @pytest.mark.parametrize("training", [False, True])
    @pytest.mark.parametrize("grad", [False, True])
    @pytest.mark.parametrize("batch_first", [False, True])
    def test_a_padded_encoder(self, calls, training, grad, batch_first):
        theirs = encoder(batch_first=batch_first).train(training)
        swapped = swap(copy.deepcopy(theirs))
        x = torch.randn(BATCH, TOKENS, DIM)
        seen = calls(MultiheadAttention)
        with torch.set_grad_enabled(grad):
            outputs = [
                model(x if batch_first else x.transpose(0, 1), src_key_padding_mask=PADDED)
                for model in (swapped.model, theirs)
            ]
        ours, expected = (output if batch_first else output.transpose(0, 1) for output in outputs)
        assert len(seen) == 2
        assert ours.isfinite().all()
        torch.testing.assert_close(ours[~PADDED], expected[~PADDED], atol=1e-6, rtol=1e-5)

    def test_an_encoder_that_makes_nested_tensors_no_longer_does(self):
        model = encoder()
        assert model.use_nested_tensor
        assert swap(model).notes == ("the model itself: use_nested_tensor is False now",)
        assert not model.use_nested_tensor
        by_hand = encoder()
        by_hand.layers[0].self_attn = MultiheadAttention(DIM, 2, batch_first=True)
        assert len(swap(by_hand).notes) == 1

    def test_a_sequence_of_nothing_but_padding(self):
        theirs = encoder().eval()
        model: Any = swap(copy.deepcopy(theirs)).model
        x, padded = torch.randn(BATCH, TOKENS, DIM), PADDED.clone()
        padded[2] = True
        with torch.no_grad():
            output = model(x, src_key_padding_mask=padded)
            model.layers[0].eval()
            assert theirs.layers[0](x, src_key_padding_mask=padded)[2].isnan().all()
        assert output.isfinite().all()

    @pytest.mark.parametrize("training", [False, True])
    @pytest.mark.parametrize("norm_first", [False, True])
    def test_a_whole_transformer(self, training, norm_first):
        theirs = nn.Transformer(DIM, 2, 2, 2, 16, 0.0, batch_first=True, norm_first=norm_first).double().train(training)
        ours: Any = swap(copy.deepcopy(theirs)).model
        source, target = torch.randn(BATCH, TOKENS, DIM).double(), torch.randn(BATCH, 5, DIM).double()
        call = {
            "tgt_mask": nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64),
            "src_key_padding_mask": torch.zeros(BATCH, TOKENS).double().masked_fill(PADDED, -torch.inf),
            "memory_key_padding_mask": torch.zeros(BATCH, TOKENS).double().masked_fill(PADDED, -torch.inf),
        }
        for hint in (None, True, False):
            output = ours(source, target, **call, tgt_is_causal=hint)
            expected = theirs(source, target, **call, tgt_is_causal=hint)
            torch.testing.assert_close(output, expected, atol=1e-10, rtol=1e-10)
        if training:
            gradients = [
                torch.autograd.grad(model(source, target, **call).square().sum(), list(model.parameters()))
                for model in (ours, theirs)
            ]
            torch.testing.assert_close(gradients[0], gradients[1], atol=1e-9, rtol=1e-9)

    def test_copies_and_saved_models(self, tmp_path, calls):
        model = encoder().eval()
        swap(model)
        torch.save(model, tmp_path / "model.pt")
        again = torch.load(tmp_path / "model.pt", weights_only=False)
        x = torch.randn(BATCH, TOKENS, DIM)
        seen = calls(MultiheadAttention)
        with torch.no_grad():
            for one in (again, copy.deepcopy(model)):
                torch.testing.assert_close(one(x), model(x), atol=0, rtol=0)
        assert len(seen) == 2 * 4

    @pytest.mark.parametrize("training", [False, True])
    def test_compiled(self, training):
        torch.compiler.reset()
        model = swap(encoder().double().train(training)).model
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        x = torch.randn(BATCH, TOKENS, DIM, dtype=torch.float64)
        with torch.set_grad_enabled(training):
            output, expected = (one(x, src_key_padding_mask=PADDED) for one in (compiled, model))
        torch.testing.assert_close(output, expected, atol=1e-12, rtol=1e-12)


class TestLinear:
    def test_all_of_torchs_and_nothing_else(self):
        class Own(nn.Linear):
            pass

        inner = nn.Linear(DIM, DIM)
        model = nn.Sequential(inner, nn.ReLU(), nn.ModuleList([inner]), Own(DIM, DIM), Linear(DIM, DIM))
        kept = list(model.parameters())
        done = swap_linear(model)
        assert done.replaced == ("0", "2.0")
        assert type(model[0]) is Linear
        assert model[2][0] is model[0]  # type: ignore[index]
        assert all(one is other for one, other in zip(kept, model.parameters(), strict=True))
        assert "TestLinear" in done.skipped["3"]
        assert str(done).startswith("2 of 3 nn.Linear replaced by regard.nn.Linear\n  replaced 0\n  replaced 2.0\n")
        assert swap_linear(model).replaced == ()

    def test_a_layer_itself(self):
        layer = nn.Linear(DIM, DIM)
        done = swap_linear(layer)
        assert type(done.model) is Linear
        assert done.model.weight is layer.weight

    def test_a_whole_model_says_the_same_and_learns_the_same(self, calls):
        ours, source = nn.Transformer(64, 2, 1, 1, 4096, dropout=0.0, batch_first=True), torch.randn(2, 70, 64)
        theirs, called = copy.deepcopy(ours), calls(Linear)
        assert len(swap_linear(ours).replaced) == 4  # of the attention, the output is a subclass
        outputs = [model(source, source) for model in (ours, theirs)]
        assert len(called) == 4
        torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)
        for output in outputs:
            output.square().mean().backward()
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-6)

    def test_many_names_are_not_all_spelled_out(self):
        said = str(swap_linear(nn.Sequential(*(nn.Linear(1, 1) for _ in range(1015)))))
        assert said.splitlines()[0] == "1015 of 1015 nn.Linear replaced by regard.nn.Linear"
        assert said.splitlines()[-2:] == ["  replaced 11", "  and 1,003 more"]

    def test_many_that_are_left_are_not_all_spelled_out(self):
        said = str(swap_linear(nn.Sequential(*(nn.LazyLinear(1) for _ in range(30)))))
        assert said.splitlines()[0] == "0 of 30 nn.Linear replaced by regard.nn.Linear"
        assert said.splitlines()[-1] == "  and 18 more"

    def test_hooks_come_along(self):
        model, seen = nn.Sequential(nn.Linear(DIM, DIM)), []
        model[0].register_forward_hook(lambda *_: seen.append(1))
        assert swap_linear(model).notes == ("0: preserved 1 hook",)
        model(torch.randn(2, DIM))
        assert seen == [1]

    def test_no_module_is_refused(self):
        with pytest.raises(
            ConfigurationError, match=r"swap_linear needs a torch\.nn\.Module, such as .*; this is a int"
        ):
            swap_linear(3)  # type: ignore[arg-type]
