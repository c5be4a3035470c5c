"""A job's loss curve as a picture: losses of its training steps and of its evaluations, SVG."""

from xml.sax.saxutils import escape

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 64, 20, 48, 48  # margins around the axes


def ticks(low, high, about=6):
    """Round numbers in [low, high]: multiples of 1, 2 or 5 times a power of ten."""
    raw = (high - low) / about or 1
    power = 10.0 ** (len(str(int(raw))) - 1) if raw >= 1 else 0.1
    while power > raw:
        power /= 10
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)
    first = -int(-low // step)
    count = int((high + step * 1e-9) // step) - first + 1
    return [(first + i) * step for i in range(count)]


def svg(title, losses):
    """`losses`: points with `step`, `trainLoss` and, where the step was evaluated, `validationLoss`
    (nats per token), in ascending order of steps. At least two points."""
    train = [(int(point["step"]), point["trainLoss"]) for point in losses]
    validation = [(int(point["step"]), point["validationLoss"]) for point in losses
                  if point.get("validationLoss")]
    last = train[-1][0]
    values = [loss for _, loss in train + validation]
    low, high = min(values), max(values)
    margin = 0.05 * (high - low) or 0.1
    low, high = low - margin, high + margin

    def x(step):
        return LEFT + (WIDTH - LEFT - RIGHT) * step / last

    def y(loss):
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - loss) / (high - low)

    def text(at_x, at_y, words, anchor="middle", more=""):
        return f'<text x="{at_x:.1f}" y="{at_y:.1f}" text-anchor="{anchor}"{more}>{escape(words)}</text>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="13" fill="#333">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        text(LEFT, 26, title, "start", ' font-size="16" font-weight="bold"'),
    ]
    for value in ticks(low, high):
        parts.append(f'<path d="M{LEFT} {y(value):.1f}H{WIDTH - RIGHT}" stroke="#e0e0e0"/>')
        parts.append(text(LEFT - 8, y(value) + 4, f"{value:.4g}", "end"))
    for step in ticks(0, last):
        parts.append(text(x(step), HEIGHT - BOTTOM + 20, f"{step:g}"))
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, "step"))
    parts.append(text(LEFT, TOP - 6, "loss, nats per token", "start"))
    line = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in train)
    parts.append(f'<polyline points="{line}" fill="none" stroke="#1f77b4" stroke-width="1.5"/>')
    for step, loss in validation:
        parts.append(f'<circle cx="{x(step):.1f}" cy="{y(loss):.1f}" r="4" fill="#d62728"/>')
    legend = [("#1f77b4", f"training, {train[-1][1]:.4f} at the end")]
    if validation:
        legend.append(("#d62728", f"validation, {validation[-1][1]:.4f} at the end"))
    for i, (colour, words) in enumerate(legend):
        at = TOP + 16 + 20 * i
        parts.append(f'<rect x="{WIDTH - RIGHT - 232}" y="{at - 9}" width="10" height="10" fill="{colour}"/>')
        parts.append(text(WIDTH - RIGHT - 216, at, words, "start"))
    return "\n".join(parts + ["</svg>", ""])
