"""The page: well-formed figures with titles, no reference to anything outside, every arm in it."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from primus_odc.report.html import render_page
from primus_odc.report.ladder import Part
from primus_odc.report.result import ComparisonResult
from primus_odc.report.svg import Scale, legend
from primus_odc.report.timeline import Span
from primus_odc.report.timeline_figure import merge_small
from tests.report.report_records import make_comparison

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def result() -> ComparisonResult:
    return make_comparison(steps=6, ranks=3, extra_arms=True)


@pytest.fixture(scope="module")
def page(result: ComparisonResult) -> str:
    return render_page(result)


class Tags(HTMLParser):
    """Checks that every element is closed in order and collects ids and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.attributes: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "meta":
            self.open.append(tag)
        self._collect(attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._collect(attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def _collect(self, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [value or "" for name, value in attrs if name == "id"]
        self.attributes += [(name, value or "") for name, value in attrs]


def figures(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, flags=re.S)]


def test_html_is_well_formed_with_unique_ids(page: str) -> None:
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert len(tags.ids) == len(set(tags.ids))


def test_nothing_outside_is_referenced(page: str) -> None:
    tags = Tags()
    tags.feed(page)
    assert not [value for name, value in tags.attributes if name in ("src", "href", "xlink:href", "srcset", "data", "action")]
    assert set(re.findall(r"url\(([^)]*)\)", page)) <= {
        f"#timeline-{size}-{kind}" for size in ("wide", "narrow") for kind in ("wait", "idle")
    }
    assert "@import" not in page and "<script" not in page and "<link" not in page
    assert set(re.findall(r"\w+://[^\s'\"<]+", page)) == {"http://www.w3.org/2000/svg"}


def test_five_figures_for_two_widths_each_told_in_words(page: str) -> None:
    drawn = figures(page)
    assert len(drawn) == 10
    for svg in drawn:
        title, description = svg.find(f"{SVG}title"), svg.find(f"{SVG}desc")
        assert title is not None and description is not None and title.text and description.text
        assert svg.get("role") == "img"
        assert svg.get("aria-labelledby") == f"{title.get('id')} {description.get('id')}"


def test_coordinates_stay_inside(page: str) -> None:
    for svg in figures(page):
        _, _, width, height = map(float, (svg.get("viewBox") or "").split())
        for item in svg.iter(f"{SVG}rect"):
            x, y, w, h = (float(item.get(key) or 0) for key in ("x", "y", "width", "height"))
            assert min(x, y) >= -0.01 and x + w <= width + 0.01 and y + h <= height + 0.01
        for item in svg.iter(f"{SVG}circle"):
            assert 0 <= float(item.get("cx") or 0) <= width and 0 <= float(item.get("cy") or 0) <= height


def test_a_ladder_that_climbs_stays_inside(result: ComparisonResult) -> None:
    """A plan that adds 500 ms, more than made up for by its fewer transfers."""
    assert result.ladder is not None and result.ladder.split is not None
    rest = Part.of([result.ladder.odc_pad_ms - result.ladder.odc_nopad_ms + 500.0])
    split = replace(result.ladder.split, plan=Part.of([-500.0]), plan_rest=rest)
    page = render_page(replace(result, ladder=replace(result.ladder, split=split)))
    assert 'class="added"' in page and "+500.0" in page
    test_coordinates_stay_inside(page)


def test_every_arm_and_waiting_is_shown(result: ComparisonResult, page: str) -> None:
    for arm in result.arms:
        assert page.count(arm.arm) > 5
    waits = re.findall(r'class="k-wait hatched-timeline-wide"', page)
    assert len(waits) > 3 * 6
    assert "removed waiting" in page


def test_text_is_escaped(result: ComparisonResult) -> None:
    nasty = "<b>&'\""
    arms = [replace(arm, arm=nasty) if arm.arm == "nccl_zero2" else arm for arm in result.arms]
    page = render_page(
        ComparisonResult.build(arms=arms, warmup_steps=2, machine={"cpu": nasty}, config={nasty: nasty}, notes=[nasty], command=nasty)
    )
    assert "<b>&'" not in page
    assert len(figures(page)) == 8
    Tags().feed(page)


def test_one_arm_alone_makes_a_page(result: ComparisonResult) -> None:
    page = render_page(ComparisonResult.build(arms=result.arms[:1], warmup_steps=2, machine={}))
    assert "No timeline was recorded" in page and "Needs nccl_pad" in page
    assert len(figures(page)) == 6


def test_scale_by_hand() -> None:
    linear = Scale(low=0, high=10, start=100, end=200)
    assert (linear(0), linear(5), linear(10)) == (100, 150, 200)
    assert linear.ticks(5) == [0, 2, 4, 6, 8, 10]
    logarithmic = Scale(low=1e-9, high=1e-4, start=0, end=50, log=True)
    assert logarithmic(1e-6) == pytest.approx(30)
    assert logarithmic.ticks(6) == pytest.approx([1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4])


def test_legend_wraps() -> None:
    one, height = legend([("a", "first"), ("b", "second")], 0, 0, 1000)
    assert (len(one), height) == (4, 18)
    assert legend([("a", "first"), ("b", "second")], 0, 0, 80)[1] == 36


def test_merge_small_keeps_every_moment() -> None:
    ends = [1.0, 1.1, 1.2, 1.25, 2.0, 3.0, 3.05]
    kinds = ["forward", "wait", "forward", "wait", "forward", "forward", "wait"]
    spans = [
        Span(rank=0, kind=kind, start_ms=start, end_ms=end, microbatch=0)  # type: ignore[arg-type]
        for kind, start, end in zip(kinds, [0.0, *ends], ends, strict=False)
    ]
    merged = merge_small(spans, 0.5)
    assert [(span.kind, span.start_ms, span.end_ms) for span in merged] == [
        ("forward", 0.0, 1.0),
        ("wait", 1.0, 1.25),
        ("forward", 1.25, 3.0),
        ("wait", 3.0, 3.05),
    ]
