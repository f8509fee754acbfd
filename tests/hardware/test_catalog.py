"""The catalog: every device sourced, found by exactly its own names, and by nothing else's."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

import preflop.hardware
from preflop.errors import BadFile, UnknownDevice
from preflop.hardware.catalog import devices, find, match_torch_name, normalize, parse
from preflop.hardware.checksum import checksums
from preflop.hardware.device import CONFIDENCE, Device, MissingFigure

EVERY = {device.id: device for device in devices()}
every_device = pytest.mark.parametrize("device", EVERY.values(), ids=EVERY)

# Which card a name means that several cards could be called.
AMBIGUOUS = {
    "h100": "h100-sxm5-80gb",
    "h100-sxm": "h100-sxm5-80gb",
    "h100-sxm5": "h100-sxm5-80gb",
    "h100-pcie": "h100-pcie-80gb",
    "h100-nvl": "h100-nvl-94gb",
    "a100": "a100-sxm4-80gb",
    "a100-80gb": "a100-sxm4-80gb",
    "a100-40gb": "a100-sxm4-40gb",
    "a100-sxm": "a100-sxm4-80gb",
    "a100-pcie": "a100-pcie-80gb",
    "v100": "v100-sxm2-16gb",
    "v100-32gb": "v100-sxm2-32gb",
    "h200": "h200-sxm-141gb",
    "b200": "b200-sxm-180gb",
    "gb200": "gb200-186gb",
    "gh200": "gh200-96gb",
    "mi250x": "mi250x-gcd",
    "rtx-pro-6000": "rtx-pro-6000-ws",
    "4090": "rtx-4090",
    "rtx4090": "rtx-4090",
    "RTX 4090": "rtx-4090",
    "rtx_4090": "rtx-4090",
    "3090": "rtx-3090",
    "l4": "l4",
    "l40s": "l40s",
    "mi300x": "mi300x",
    "tpu-v5p": "tpu-v5p",
    "v6e": "tpu-v6e",
    " H100 SXM ": "h100-sxm5-80gb",
}


def test_the_catalog_holds_every_device_with_memory_bandwidth_and_a_peak() -> None:
    """67 of the 69 devices known have all three; the M2 Max and the M4 have no sourced capacity."""
    assert len(EVERY) == 67
    assert not {"m2-max", "m4"} & set(EVERY)


@every_device
def test_each_figure_has_a_source_and_a_letter_of_trust(device: Device) -> None:
    """A figure says where it was read, as "kind: place", and how far to trust it."""
    for figure in (*device.figures.values(), *device.peaks.values()):
        kind, colon, place = figure.source.partition(": ")
        assert kind in {"vendor", "quote", "code", "log", "third", "derived"}
        assert colon and len(place) > 5
        assert figure.confidence in CONFIDENCE


@every_device
def test_each_device_answers_what_preflop_computes_with(device: Device) -> None:
    """Memory, bandwidth and at least one dense peak are positive numbers, and memory says its basis."""
    assert device.memory_bytes > 10**9
    assert device.memory_basis
    assert device.bandwidth_bytes_per_s > 50e9
    assert device.peaks
    assert all(device.peak_flops_per_s(name) > 0.2e12 for name in device.peaks)


@every_device
def test_a_device_is_found_by_each_of_its_names(device: Device) -> None:
    """Id, name, aliases and torch's names all lead to the device; only "mps" is shared."""
    names = (device.id, device.name, *device.aliases, *device.torch_names)
    for name in names:
        if name != "mps":
            assert find(name) is device
            assert find(name.upper().replace(" ", "_")) is device


def test_no_name_means_two_devices() -> None:
    """Ids, names, aliases and torch names are distinct after normalising, but for Apple's "mps"."""
    owners = Counter(
        name
        for device in EVERY.values()
        for name in {normalize(n) for n in (device.id, device.name, *device.aliases, *device.torch_names)}
    )
    assert [name for name, count in owners.items() if count > 1] == ["mps"]


def test_an_alias_is_listed_once() -> None:
    """No device repeats a name that already leads to it."""
    for device in EVERY.values():
        names = [normalize(name) for name in (device.id, *device.aliases)]
        assert len(names) == len(set(names)), device.id


@pytest.mark.parametrize(("typed", "device_id"), AMBIGUOUS.items())
def test_what_people_type_is_an_explicit_alias(typed: str, device_id: str) -> None:
    """Short names lead to one stated card."""
    assert find(typed).id == device_id


@pytest.mark.parametrize("alias", ["h100", "a100", "v100", "h200", "gh200", "mi250x", "p100", "a100-pcie"])
def test_an_ambiguous_alias_says_which_card_it_means(alias: str) -> None:
    """The device's page says what the alias means and what the others are called."""
    assert f"`{alias}`" in find(alias).alias_note


@pytest.mark.parametrize(
    "name",
    ["NVIDIA RTX A4000", "NVIDIA A16", "h100-smx", "NVIDIA GeForce RTX 4090 D", "H10", "", "   ", "a", "cpu"],
)
def test_an_unknown_name_is_an_error_and_never_a_default(name: str) -> None:
    """A name that is part of a known one, or has a known one in it, is unknown."""
    for lookup in (find, match_torch_name):
        with pytest.raises(UnknownDevice):
            lookup(name)


def test_an_unknown_name_says_what_is_near_where_all_are_and_how_to_add_it() -> None:
    """The message names the nearest, `preflop hardware` and docs/add-a-gpu.md."""
    with pytest.raises(UnknownDevice) as caught:
        find("h100-smx")
    message = str(caught.value)
    assert "no device named 'h100-smx'" in message
    assert "Nearest: h100-sxm" in message
    assert "`preflop hardware`" in message
    assert "docs/add-a-gpu.md" in message


def test_a_shared_torch_name_lists_its_candidates() -> None:
    """Every Apple GPU reports "mps": the answer is a question, not a guess."""
    for total_memory_bytes in (None, 16 * 10**9):
        with pytest.raises(UnknownDevice, match=r"m1, m1-max.*\n.*Say which one"):
            match_torch_name("mps", total_memory_bytes)
    with pytest.raises(UnknownDevice, match="m4-pro"):
        find("mps")


@pytest.mark.parametrize(
    ("reported", "total_memory_bytes", "device_id"),
    [
        ("NVIDIA H100 80GB HBM3", 81090 * 2**20, "h100-sxm5-80gb"),
        ("NVIDIA A100-SXM4-80GB", 81050 * 2**20, "a100-sxm4-80gb"),
        ("A100-SXM4-40GB", None, "a100-sxm4-40gb"),
        ("NVIDIA A100 80GB PCIe", None, "a100-pcie-80gb"),
        ("NVIDIA L4", 23_659_151_360, "l4"),
        ("Tesla T4", 15_079 * 2**20, "t4"),
        ("NVIDIA GeForce RTX 3090", 24_575 * 2**20, "rtx-3090"),
        ("NVIDIA GH200 480GB", 97_800_000_000, "gh200-96gb"),
        ("NVIDIA H20", 97_285 * 2**20, "h20-96gb"),
        ("AMD Instinct MI300X", 196_592 * 2**20, "mi300x"),
        ("AMD Instinct MI300X OAM", None, "mi300x"),
        ("NVIDIA H200", 143_156 * 2**20, "h200-sxm-141gb"),
    ],
)
def test_what_torch_reports_resolves(reported: str, total_memory_bytes: int | None, device_id: str) -> None:
    """Names and totals seen in logs lead to their device."""
    assert match_torch_name(reported, total_memory_bytes).id == device_id


@every_device
def test_a_measured_total_fits_its_own_device(device: Device) -> None:
    """The memory check accepts every total that the catalog itself records."""
    if "torch_total_memory_bytes" in device.figures and "mps" not in device.torch_names:
        for name in device.torch_names:
            assert match_torch_name(name, device.memory_bytes) is device


@pytest.mark.parametrize(
    ("reported", "total_memory_bytes"),
    [("NVIDIA H20", 143_771 * 2**20), ("NVIDIA H100 80GB HBM3", 10 * 2**30), ("NVIDIA A30", 12 * 2**30)],
)
def test_a_known_name_with_another_memory_is_unknown(reported: str, total_memory_bytes: int) -> None:
    """The 141 GB H20 and slices of a GPU are not the device of that name."""
    with pytest.raises(UnknownDevice, match="variant, or a slice"):
        match_torch_name(reported, total_memory_bytes)


def test_an_alias_is_no_torch_name() -> None:
    """`match_torch_name` takes what torch reports, not what people type."""
    with pytest.raises(UnknownDevice):
        match_torch_name("h100")


GOOD = """
id = "toy"
name = "Toy"
vendor = "NVIDIA"
arch = "Toy sm_99"
aliases = []
torch_names = ["NVIDIA Toy"]
torch_names_basis = "assumed"
[sources]
sheet = "vendor: a data sheet"
[figures]
memory_sold_gb = { value = 8, source = "sheet", confidence = "V" }
memory_bandwidth_bytes_per_s = { value = 1e12, source = "sheet", confidence = "V" }
[peaks]
bfloat16 = { value = 1e14, source = "sheet", confidence = "V" }
"""


def test_a_file_that_is_whole_is_a_device() -> None:
    """The text that docs/add-a-gpu.md asks for parses."""
    device = parse(GOOD, "toy.toml")
    assert device.memory_bytes == 8 * 10**9
    assert device.compute_capability == (9, 9)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('source = "sheet", confidence = "V" }\n[peaks]', 'confidence = "V" }\n[peaks]', "needs a source"),
        ('1e14, source = "sheet", confidence = "V"', '1e14, source = "sheet"', "confidence"),
        ('1e14, source = "sheet"', '1e14, source = "elsewhere"', "elsewhere"),
        ('vendor = "NVIDIA"', "", "vendor"),
        ("[peaks]", "[peaks", "not valid TOML"),
    ],
)
def test_a_figure_without_source_or_trust_is_refused(old: str, new: str, message: str) -> None:
    """A file that lacks a source, a letter or a key is an error that says what is missing."""
    assert old in GOOD
    with pytest.raises(BadFile, match=message):
        parse(GOOD.replace(old, new), "toy.toml")


def test_each_file_is_named_by_its_id() -> None:
    """`hardware/catalog/<id>.toml`, so that an id leads to its file."""
    folder = Path(preflop.hardware.__file__).parent / "catalog"
    assert {path.stem for path in folder.glob("*.toml")} == set(EVERY)
    for path in folder.glob("*.toml"):
        assert f'\nid = "{path.stem}"\n' in "\n" + path.read_text("utf-8")


def test_a_capability_is_read_from_the_architecture() -> None:
    """sm_90 is (9, 0); sm_120 is (12, 0); AMD, TPU and Apple have none."""
    assert find("h100").compute_capability == (9, 0)
    assert find("b300").compute_capability == (10, 3)
    assert find("5090").compute_capability == (12, 0)
    assert find("t4").compute_capability == (7, 5)
    assert find("mi300x").compute_capability is None
    assert find("tpu-v5p").compute_capability is None


def test_memory_is_what_torch_reports_else_as_sold() -> None:
    """The H100's 80 GB are 79.19 GiB to torch; GB200's total is not known, so it is 186e9 as sold."""
    h100 = find("h100")
    assert h100.memory_bytes == 81090 * 2**20
    assert h100.memory_sold_bytes == 80 * 10**9
    assert "torch reports" in h100.memory_basis
    gb200 = find("gb200")
    assert gb200.memory_bytes == 186 * 10**9
    assert "as sold" in gb200.memory_basis
    assert find("mi325x").memory_sold_bytes == 256 * 2**30


@pytest.mark.parametrize(
    ("dtype", "peak_flops_per_s"),
    [
        ("bfloat16", 989.4e12),
        ("torch.bfloat16", 989.4e12),
        ("bf16", 989.4e12),
        ("float16", 989.4e12),
        ("float32", 66.9e12),
        ("float64", 33.5e12),
        ("float64_tensor", 66.9e12),
        ("tf32", 494.7e12),
        ("float8_e4m3fn", 1978.9e12),
        ("float8_e5m2", 1978.9e12),
        ("int8", 1978.9e12),
    ],
)
def test_a_peak_is_found_by_torchs_name_of_the_dtype(dtype: str, peak_flops_per_s: float) -> None:
    """The H100's dense peaks; a data sheet's 1979e12 in bf16 is with sparsity."""
    assert find("h100-sxm").peak_flops_per_s(dtype) == pytest.approx(peak_flops_per_s, rel=1e-12)


@pytest.mark.parametrize(
    ("device_id", "dtype"),
    [
        ("a100", "float8_e4m3fn"),
        ("v100", "bfloat16"),
        ("t4", "tf32"),
        ("h100", "float4_e2m1fn_x2"),
        ("h100", "complex64"),
        ("h100", "int64"),
        ("tpu-v4", "float32"),
        ("h100", "nonsense"),
    ],
)
def test_a_missing_peak_is_an_error_and_never_another_dtypes(device_id: str, dtype: str) -> None:
    """The error names the device, the dtype and what there is."""
    with pytest.raises(MissingFigure, match=r"no dense peak for .*\n  It has: "):
        find(device_id).peak_flops_per_s(dtype)


def test_a_matrix_product_in_float64_runs_on_the_matrix_units() -> None:
    """cuBLAS reaches 49 to 56 TFLOP/s in float64 on an H100, above the 33.5 of its ordinary units."""
    assert find("h100").matmul_peak_flops_per_s("float64") == pytest.approx(66.9e12)
    assert find("h100").matmul_peak_flops_per_s("bfloat16") == pytest.approx(989.4e12)
    assert find("rtx-4090").matmul_peak_flops_per_s("float32") == pytest.approx(82.6e12)


@every_device
def test_no_peak_is_the_sparse_one(device: Device) -> None:
    """The figure with sparsity stands in a note only, and is larger than the dense one."""
    for figure in device.peaks.values():
        if "with sparsity " in figure.note:
            sparse = float(figure.note.split("with sparsity ")[1])
            assert float(figure.value) < sparse


@every_device
def test_narrower_formats_are_no_slower(device: Device) -> None:
    """fp32 <= tf32 <= bf16 <= fp8 where a device has them (tf32 emulated on none)."""
    ladder = [n for n in ("float32", "tf32", "bfloat16", "float8", "float4") if n in device.peaks]
    peaks = [device.peak_flops_per_s(name) for name in ladder]
    assert peaks == sorted(peaks)


def test_the_napkin_time_of_the_specification() -> None:
    """70e9 parameters, 15e12 tokens, 1024 H100 at MFU 0.5: 143.9 days."""
    seconds = 6 * 70e9 * 15e12 / (1024 * find("h100-sxm").peak_flops_per_s("bfloat16") * 0.5)
    assert round(seconds / 86400, 1) == 143.9


def test_a_measured_context_is_given_and_a_missing_one_is_none() -> None:
    """481 MiB on an A100 with torch 2.1 (lazy loading); nothing measured for an H100."""
    assert find("a100").context_bytes == 481 * 2**20
    assert find("a100-pcie").context_bytes == 481 * 2**20
    assert find("h100").context_bytes is None


def _imports(path: Path) -> set[str]:
    nodes = ast.walk(ast.parse(path.read_text("utf-8")))
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


def test_hardware_imports_nothing_of_preflop_but_units_and_errors() -> None:
    """The room knows no tape and no operator, and asks nothing of the machine it runs on."""
    folder = Path(preflop.hardware.__file__).parent
    imported = set().union(*(_imports(path) for path in folder.glob("*.py")))
    ours = {name for name in imported if name.split(".")[0] == "preflop"}
    assert all(n in {"preflop.errors", "preflop.units"} or n.startswith("preflop.hardware") for n in ours)
    assert not imported & {"torch", "subprocess", "os", "platform", "socket"}


def test_the_example_of_the_documentation_is_a_device() -> None:
    """The TOML in docs/add-a-gpu.md parses, and both checks agree with it."""
    text = (Path(__file__).parents[2] / "docs" / "add-a-gpu.md").read_text("utf-8")
    example = text.split("```toml\n")[1].split("```")[0]
    checks = checksums(parse(example, "docs/add-a-gpu.md"))
    assert [round(check.ratio, 2) for check in checks] == [1, 1]
