"""Draw a report's figure from records, and check that no text overlaps another or is cut off."""

import itertools

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from dpbench.records.reader import read
from dpbench.report import FIGURES, LeftOut, style


def draw(run, figure):
    """Return the figure's table, the figure, and its visible texts with their boxes."""
    kind = FIGURES[figure]
    records = [record for record in read(run.path.parent) if record.kind in kind.kinds]
    left_out = LeftOut()
    frame = kind.table(records, left_out)
    with matplotlib.rc_context(style.RC):
        drawn = kind.plot(frame, kind.words(records, frame, left_out))
        FigureCanvasAgg(drawn).draw()
        beyond = {id(label) for axes in drawn.axes for label in out_of_sight(axes)}
        texts = [text for text in drawn.findobj(Text) if text.get_text().strip() and text.get_visible()]
        return frame, drawn, [(text.get_text(), text.get_window_extent()) for text in texts if id(text) not in beyond]


def words(boxes):
    """The texts of `draw`, without their boxes."""
    return [text for text, _ in boxes]


def out_of_sight(axes):
    """Labels of ticks beyond the ends of an axis, which exist but are not drawn."""
    for axis, ends in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        room = 1e-9 * (max(ends) - min(ends))
        for tick in axis.get_major_ticks():
            if not min(ends) - room <= tick.get_loc() <= max(ends) + room:
                yield from (tick.label1, tick.label2)


def assert_apart(drawn, boxes):
    """Assert that no text is cut off, and that none but marks of failures (✕) overlap."""
    for (text, box), (other, beside) in itertools.combinations(boxes, 2):
        apart = box.x1 <= beside.x0 + 1 or beside.x1 <= box.x0 + 1 or box.y1 <= beside.y0 + 1 or beside.y1 <= box.y0 + 1
        assert apart or "✕" in text + other, f"{text!r} lies on {other!r}"
    width, height = drawn.bbox.size
    for text, box in boxes:
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height, f"{text!r} is cut off"
