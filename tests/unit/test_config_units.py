import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticrl.config.units import format_duration, format_size, parse_count, parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("200ms", 0.2), ("10s", 10.0), ("5m", 300.0), ("1.5h", 5400.0), ("2d", 172800.0), ("0s", 0.0), ("0.25s", 0.25)],
)
def test_a_duration_is_a_number_and_its_unit(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["10", "s", "10 s", "10sec", "-1s", "1e3s", ".5s", "5.s", "1m30s", "", "10S", "١٠s"])
def test_a_duration_without_a_known_unit_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no unit"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "count"), [("512B", 512), ("16KiB", 16384), ("1.5MiB", 1572864), ("4GiB", 4 << 30), ("2TiB", 2 << 40)]
)
def test_a_size_is_a_number_and_its_unit(text: str, count: int) -> None:
    assert parse_size(text) == count


@pytest.mark.parametrize("text", ["4GB", "4", "1.3B", "4 GiB", "-1B"])
def test_a_size_without_a_known_unit_or_of_part_bytes_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"no unit|whole number"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("7B", 7 * 10**9),
        ("350M", 350 * 10**6),
        ("1.5e9", 1_500_000_000),
        ("7_000_000_000", 7 * 10**9),
        ("0.5B", 5 * 10**8),
    ],
)
def test_a_count_is_written_as_models_sizes_are(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize(
    "text", ["7GB", "7b", "B", "", "-7B", "0", "0B", "1.5", "1e-9", "1e999", "7 B", "7__0", "_7", "nan", "inf", "٧B"]
)
def test_what_is_no_count_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"no number of things: write|whole number of things"):
        parse_count(text)


@given(st.floats(min_value=0, max_value=1e12, allow_subnormal=False))
def test_every_duration_is_written_so_that_it_reads_back_to_the_same_float(seconds: float) -> None:
    assert parse_duration(format_duration(seconds)) == seconds


@given(st.integers(min_value=0, max_value=1 << 60))
def test_every_size_is_written_so_that_it_reads_back_to_the_same_bytes(count: int) -> None:
    assert parse_size(format_size(count)) == count
