"""Which modules are quantized: the map's spellings, the tensors' truth, and a message for each way they disagree."""

from dataclasses import dataclass

import pytest

from voicechat_core.errors import ConfigError
from voicechat_core.quantization import Quantization, QuantizationMap, plan

MATRICES = {"m.a": (8, 128), "m.b": (8, 96), "m.head": (16, 256)}
FOUR, EIGHT = Quantization(4, 64), Quantization(8, 64)


@dataclass
class Tensor:
    """All that is looked at."""

    shape: tuple[int, ...]
    dtype: str = "float32"


def packed(path, quantization):
    outputs, inputs = MATRICES[path]
    weight, scales = quantization.shapes(outputs, inputs)
    return {
        f"{path}.weight": Tensor(tuple(weight), "mlx.core.uint32"),
        f"{path}.scales": Tensor(tuple(scales)),
        f"{path}.biases": Tensor(tuple(scales)),
    }


def dense(path):
    return {f"{path}.weight": Tensor(MATRICES[path], "mlx.core.bfloat16")}


def of(data):
    return QuantizationMap.from_dict(data)


def only(problems):
    (problem,) = problems.values()
    return problem


# ------------------------------------------------------------------------------------------ the map


def test_a_default_and_overrides():
    found = of({"group_size": 64, "bits": 4, "m.a": {"bits": 8}, "m.b": False, "m.head": True, "quant_method": "mlx"})
    assert (found.of("m.a"), found.of("m.b"), found.of("m.head"), found.of("m.c")) == (EIGHT, FOUR, FOUR, FOUR)
    assert found.overrides == {"m.a": EIGHT, "m.b": False, "m.head": True}


def test_an_override_inherits_what_it_does_not_say():
    assert of({"group_size": 32, "bits": 4, "m.a": {"bits": 6}}).of("m.a") == Quantization(6, 32)


def test_nothing_said_is_nothing_known():
    assert of({}).of("m.a") is None
    assert of({"m.a": {"bits": 4, "group_size": 64}}).of("m.a") == FOUR


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"bits": 7, "group_size": 64}, "quantization.bits is 7; one of 2, 3, 4, 5, 6, 8 is needed"),
        ({"bits": 4}, "quantization.group_size is None; one of 32, 64, 128 is needed"),
        ({"bits": 4, "group_size": 48}, "quantization.group_size is 48; one of 32, 64, 128 is needed"),
        ({"bits": True, "group_size": 64}, "quantization.bits is True"),
        ({"bits": 4.0, "group_size": 64}, "quantization.bits is 4.0"),
        ({"bits": 4, "group_size": 32, "mode": "mxfp4"}, "quantization.mode is 'mxfp4'; only 'affine' is supported"),
        ({"a.b": {"bits": 4, "group_size": 64, "mode": "nvfp4"}}, "quantization.a.b.mode is 'nvfp4'"),
        ({"a.b": {"bits": 4}}, "quantization.a.b.group_size is None"),
    ],
)
def test_a_map_that_means_nothing_here(data, message):
    with pytest.raises(ConfigError) as caught:
        of(data)
    assert message in str(caught.value)


# ------------------------------------------------------------------------------------------ the plan


def test_scales_make_a_module_quantized():
    found = plan(
        of({"group_size": 64, "bits": 4}), packed("m.a", FOUR) | dense("m.b") | packed("m.head", FOUR), MATRICES
    )
    assert found.modules == {"m.a": FOUR, "m.head": FOUR}
    assert (found.problems, found.warnings) == ({}, [])


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_every_setting_is_read_off_the_shapes(bits, group_size):
    there = Quantization(bits, group_size)
    found = plan(of({"group_size": group_size, "bits": bits}), packed("m.a", there) | packed("m.head", there), MATRICES)
    assert found.modules == {"m.a": there, "m.head": there}
    assert found.warnings == []


@pytest.mark.parametrize(("data", "says"), [({}, "nothing"), ({"group_size": 64, "bits": 4}, str(FOUR))])
def test_the_shape_wins_over_the_map(data, says):
    found = plan(of(data), packed("m.a", Quantization(8, 32)), MATRICES)
    assert found.modules == {"m.a": Quantization(8, 32)}
    assert found.warnings == [f"m.a: config.json says {says}, its shapes 8 bits in groups of 32, which is taken"]


def test_a_mixed_build():
    data = {"group_size": 64, "bits": 3, "m.b": {"bits": 8, "group_size": 32}, "m.head": {"bits": 6, "group_size": 128}}
    settings = {"m.a": Quantization(3, 64), "m.b": Quantization(8, 32), "m.head": Quantization(6, 128)}
    tensors = {name: t for path, q in settings.items() for name, t in packed(path, q).items()}
    found = plan(of(data), tensors, MATRICES)
    assert (found.modules, found.problems, found.warnings) == (settings, {}, [])


@pytest.mark.parametrize("entry", [True, {"bits": 4, "group_size": 64}])
def test_a_dense_weight_that_the_map_calls_quantized_is_loaded_dense(entry):
    found = plan(of({"group_size": 64, "bits": 4, "m.a": entry}), dense("m.a"), MATRICES)
    assert (found.modules, found.problems) == ({}, {})
    nothing = f"config.json says {FOUR}, but nothing is packed"
    dense_all_the_same = "m.a: config.json says that it is quantized, but its weight is dense and has no scales"
    assert found.warnings == [nothing, dense_all_the_same]


def test_a_module_of_the_map_that_does_not_exist():
    found = plan(of({"group_size": 64, "bits": 4, "m.c": True, "m.d": False}), packed("m.a", FOUR), MATRICES)
    assert found.warnings == ["m.c: config.json says that it is quantized, but there is no such module"]


# ------------------------------------------------------------------------------------ inconsistencies


@pytest.mark.parametrize("part", ["weight", "biases"])
def test_scales_without(part):
    tensors = packed("m.a", FOUR)
    del tensors[f"m.a.{part}"]
    assert only(plan(of({}), tensors, MATRICES).problems) == f"m.a has scales but no {part}"


def test_biases_or_a_packed_weight_without_scales():
    tensors = packed("m.a", FOUR) | packed("m.b", Quantization(4, 32))
    del tensors["m.a.scales"], tensors["m.b.scales"], tensors["m.b.biases"]
    problems = plan(of({}), tensors, MATRICES).problems
    assert problems["m.a"] == "m.a has a packed weight (uint32) but no scales"
    assert problems["m.b"] == "m.b has a packed weight (uint32) but no scales"


def test_false_with_scales():
    found = plan(of({"group_size": 64, "bits": 4, "m.a": False}), packed("m.a", FOUR), MATRICES)
    assert only(found.problems) == "m.a has scales, but config.json says that it is not quantized (false)"
    assert found.modules == {}


def test_both_dense_and_quantized():
    found = plan(of({"group_size": 64, "bits": 4}), packed("m.a", FOUR) | dense("m.a"), MATRICES)
    expected = "m.a is there both dense (bfloat16 weight) and quantized (scales): one of the two is needed"
    assert only(found.problems) == expected


def test_a_group_size_that_does_not_divide():
    tensors = packed("m.b", Quantization(4, 32))
    tensors["m.b.scales"] = tensors["m.b.biases"] = Tensor((8, 1))
    found = plan(of({"group_size": 64, "bits": 4}), tensors, MATRICES)
    assert only(found.problems) == "m.b: group_size 64 does not divide its 96 inputs"


def test_shapes_that_no_setting_makes():
    tensors = packed("m.a", FOUR) | {"m.a.weight": Tensor((8, 17), "mlx.core.uint32")}
    said = plan(of({"group_size": 64, "bits": 4}), tensors, MATRICES)
    expected = "m.a: weight [8, 17] and scales [8, 2]; 4 bits in groups of 64 make them [8, 16] and [8, 2]"
    assert only(said.problems) == expected
    unsaid = plan(of({}), tensors, MATRICES)
    assert only(unsaid.problems) == (
        "m.a: weight [8, 17] and scales [8, 2] fit no bits and group size for 8 outputs and 128 inputs"
    )


def test_scales_and_biases_of_different_shapes():
    tensors = packed("m.a", FOUR) | {"m.a.biases": Tensor((8, 3))}
    assert only(plan(of({}), tensors, MATRICES).problems) == "m.a.scales has shape [8, 2] but m.a.biases [8, 3]"


def test_scales_of_something_that_is_no_matrix():
    tensors = {"conv.weight": Tensor((8, 4), "mlx.core.uint32"), "conv.scales": Tensor((8, 1))}
    found = plan(of({}), tensors | {"conv.biases": Tensor((8, 1))}, MATRICES)
    assert only(found.problems) == "conv has scales, but this model has no matrix of that name that could be quantized"


def test_a_map_over_a_dense_checkpoint_is_told():
    assert plan(of({"group_size": 64, "bits": 4}), dense("m.a"), MATRICES).warnings == [
        f"config.json says {FOUR}, but nothing is packed"
    ]


@pytest.mark.parametrize("entry", ["false", 0, 1, [4, 64], 4.0])
def test_an_entry_of_a_module_that_says_nothing(entry):
    with pytest.raises(ConfigError, match=r"quantization\.m\.a is "):
        of({"bits": 4, "group_size": 64, "m.a": entry})


def test_what_other_software_keeps_in_its_map_is_ignored():
    found = of({"bits": 4, "group_size": 64, "load_in_4bit": True, "quant_method": "mlx", "skip": ["m.a"]})
    assert (found.default, found.overrides) == (FOUR, {})


def test_a_problem_is_told_once():
    tensors = packed("m.a", FOUR)
    del tensors["m.a.scales"], tensors["m.a.biases"]
    found = plan(of({"group_size": 64, "bits": 4, "m.a": True}), tensors, MATRICES)
    assert only(found.problems) == "m.a has a packed weight (uint32) but no scales"
    assert found.warnings == []
