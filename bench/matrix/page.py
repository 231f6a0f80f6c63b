"""The report as one HTML page that needs nothing else: the same blocks, with pictures."""

import re
from collections.abc import Sequence
from html import escape

from bench.matrix.arms import BASELINE, OURS
from bench.matrix.figures import HOT_RESTORED, HOT_TTFT, by_group, difference
from bench.matrix.plots import draw
from bench.matrix.report import Block, Heading, Picture, Table, Text, blocks
from bench.matrix.results import Plan, Result
from bench.matrix.targets import verdicts

_STYLE = """
:root { --ink:#1d2330; --soft:#5d6675; --line:#e2e6ec; --paper:#fff; --panel:#f6f8fb;
  --good:#1d7f4f; --bad:#b3362b; --blue:#2f6fde; }
* { box-sizing:border-box }
body { margin:0; background:var(--paper); color:var(--ink);
  font:15px/1.55 system-ui,-apple-system,"Segoe UI",sans-serif }
main { max-width:1080px; margin:0 auto; padding:40px 24px 80px }
h1 { font-size:30px; line-height:1.2; margin:0 0 8px }
h2 { font-size:20px; margin:44px 0 8px; padding-top:20px; border-top:1px solid var(--line) }
p { color:var(--soft); max-width:78ch; margin:8px 0 }
.tiles { display:grid; grid-template-columns:repeat(auto-fit,minmax(165px,1fr)); gap:12px;
  margin:20px 0 }
.tile { background:var(--panel); border:1px solid var(--line); border-radius:10px;
  padding:14px 16px }
.tile b { display:block; font-size:26px; line-height:1.2; color:var(--blue) }
.tile span { color:var(--soft); font-size:13px }
.wide { overflow-x:auto; margin:12px 0 }
table { border-collapse:collapse; font-size:13px; width:100% }
th,td { padding:6px 10px; border-bottom:1px solid var(--line); text-align:right;
  vertical-align:top }
th { color:var(--soft); font-weight:600; background:var(--panel) }
th.l,td.l { text-align:left }
th.l { white-space:nowrap }
tbody tr.ours { background:#2f6fde14; font-weight:600 }
td small { display:block; color:var(--soft); font-weight:400; white-space:nowrap }
.met { color:var(--good); font-weight:600 } .missed { color:var(--bad); font-weight:600 }
.picture { background:#fff; border:1px solid var(--line); border-radius:10px; padding:10px;
  margin:12px 0 }
.picture svg { width:100%; height:auto; display:block }
.picture p { font-size:12px; margin:4px 0 0 }
details summary { cursor:pointer; color:var(--soft); margin-top:8px }
code { background:var(--panel); padding:1px 4px; border-radius:4px }
"""
_LONG = 12  # lines beyond which a table is folded


def render_page(plan: Plan, cells: Sequence[Result]) -> str:
    """Return the page."""
    found = blocks(plan, cells)
    body = []
    for number, block in enumerate(found):
        body.append(_block(block, plan, cells))
        if number == 2 and cells:
            body.append(_tiles(plan, cells))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(plan.title)}</title><style>{_STYLE}</style></head>"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def _block(block: Block, plan: Plan, cells: Sequence[Result]) -> str:
    if isinstance(block, Heading):
        return f"<h{block.level}>{escape(block.text)}</h{block.level}>"
    if isinstance(block, Text):
        return f"<p>{_inline(block.text)}</p>"
    if isinstance(block, Table):
        return _table(block)
    return _picture(block, plan, cells)


def _inline(text: str) -> str:
    text = escape(text)
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", text)
    return re.sub(r"\*\*([^*]+)\*\*", r'<span class="missed">\1</span>', text)


def _table(table: Table) -> str:
    def side(number: int) -> str:
        return ' class="l"' if number < table.left else ""

    head = "".join(f"<th{side(n)}>{_inline(text)}</th>" for n, text in enumerate(table.headers))
    lines = []
    for line in table.lines:
        ours = ' class="ours"' if str(line[0]).startswith(f"{OURS}:") else ""
        row = "".join(f"<td{side(n)}>{_value(text)}</td>" for n, text in enumerate(line))
        lines.append(f"<tr{ours}>{row}</tr>")
    made = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    made = f'<div class="wide">{made}</div>'
    if len(lines) > _LONG and table.left == len(table.headers) > 4:
        return f"<details><summary>{len(lines)} lines</summary>{made}</details>"
    return made


def _value(text: str) -> str:
    """Return a cell; its interval goes under the value."""
    if text == "met":
        return '<span class="met">met</span>'
    if match := re.fullmatch(r"([^()]+?) \(([^()]+)\)", text):
        return f"{_inline(match[1])}<small>{_inline(match[2])}</small>"
    return _inline(text)


def _tiles(plan: Plan, cells: Sequence[Result]) -> str:
    tiles = []
    groups = by_group(cells)
    for (label, budget), arms in groups.items():
        if label != "w1s" or OURS not in arms or BASELINE not in arms:
            continue
        hits = difference(arms[OURS], arms[BASELINE], HOT_RESTORED)
        if hits is not None:
            said = f"hot restore hits, tier {budget}; stock LRU {hits.b:.0%}"
            tiles.append((f"{hits.a:.0%}", said))
        times = difference(arms[OURS], arms[BASELINE], HOT_TTFT)
        if times is not None:
            said = f"mean hot time to first token, tier {budget}; stock LRU {times.b:.2f} s"
            tiles.append((f"{times.a:.2f} s", said))
    if plan.targets:
        judged = [v.holds for v in verdicts(cells) if v.holds is not None]
        tiles.append((f"{sum(judged)} of {len(judged)}", "targets met, of those measured"))
    made = "".join(f'<div class="tile"><b>{b}</b><span>{escape(s)}</span></div>' for b, s in tiles)
    return f'<div class="tiles">{made}</div>' if tiles else ""


def _picture(block: Picture, plan: Plan, cells: Sequence[Result]) -> str:
    planned = [each for each in plan.cells if each.label == block.label]
    groups = by_group(cells)
    budgets = dict.fromkeys(each.budget for each in planned)
    measured = {
        budget: groups[block.label, budget]
        for budget in sorted(budgets, key=lambda b: _size(b))
        if (block.label, budget) in groups
    }
    svg = draw(planned, measured)
    told = "Bars: measured, with 95% intervals. Diamonds: predicted by simulation before the run."
    return f'<div class="picture">{svg}<p>{told}</p></div>'


def _size(budget: str) -> float:
    match = re.match(r"[\d.]+", budget)
    return float(match[0]) if match else -1.0
