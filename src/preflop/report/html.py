"""The account as one HTML file that needs nothing else: tables and pictures."""

from __future__ import annotations

from importlib import resources
from typing import TYPE_CHECKING

from preflop.report import tables

if TYPE_CHECKING:
    from preflop.account import Account

OPERATORS_SHOWN = 40


def account_html(account: Account, *, top: int = OPERATORS_SHOWN) -> str:
    """The page's markup.

    Args:
        top: how many operators to list.
    """
    import jinja2

    from preflop import __version__
    from preflop.report.plots import roofline_svg, timeline_svg

    source = (resources.files("preflop.report") / "account.html.jinja").read_text("utf-8")
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(source)
    subject = account.tape.subject
    page: str = template.render(
        headline=tables.headline(account),
        verdict=account.verdict,
        time=tables.time_sentence(account),
        fits=tables.fits_sentence(account),
        allocated=tables.allocated_sentence(account),
        fits_on_device=account.memory.fits,
        peak=tables.peak_sentence(account),
        timeline_svg=timeline_svg(account),
        columns=tables.columns_table(account.memory.columns),
        at_peak=tables.peak_table(account.memory.at_peak, account.memory.peak_bytes),
        six_nd=tables.six_nd_sentence(account),
        flops=tables.flops_table(account.flops),
        kinds=tables.kinds_table(account.flops),
        why=tables.six_nd_table(account),
        traffic=tables.traffic_sentence(account),
        roofline_svg=roofline_svg(account),
        operators=tables.operators_table(account.operators, top, shapes=True),
        unknown=tables.unknown_sentence(account),
        assumptions=account.assumptions,
        version=__version__,
        torch_version=subject.torch_version if subject else "",
    )
    return page
