// Draws every chart of the report from the one JSON object in the page: uPlot keeps scales, axes and cursor,
// the hook `draw` adds the marks. A mark is a box [from, to] with, where it has them, a line [low, high], a
// tick and a dot; a horizontal chart has a row per group, with the group's name above it.

const LOG_FROM = 30; // largest over smallest value from which an axis of times is logarithmic
const ROW_PX = 30;
const FONT = "11px system-ui, sans-serif";
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const short = (value) => (value >= 10000 ? `${value / 1000}k` : value.toLocaleString("en"));

// The marks of all groups in a row; `place` is the middle and `half` half the thickness, in groups.
function placed({ groups, is_horizontal }) {
  return groups.flatMap(([name, marks], group) => marks.map((mark, index) => {
    const half = is_horizontal ? 0.17 : Math.min(0.4 / marks.length, 0.2);
    return { ...mark, name, half, place: group + (2 * index + 1 - marks.length) * half + (is_horizontal ? 0.2 : 0) };
  }));
}

function drawMarks(plot, chart, marks) {
  const context = plot.ctx;
  const ratio = devicePixelRatio;
  const point = (place, value) => {
    const [along, across] = [plot.valToPos(place, "x", true), plot.valToPos(value, "y", true)];
    return chart.is_horizontal ? [across, along] : [along, across];
  };
  const stroke = (name, width, ...paths) => {
    context.strokeStyle = colour(name);
    context.lineWidth = width * ratio;
    context.beginPath();
    for (const [from, to] of paths) context.moveTo(...point(...from)), context.lineTo(...point(...to));
    context.stroke();
  };
  context.save();
  for (const { place, half, style, box, line, tick, dot, name } of marks) {
    const [[left, top], [right, bottom]] = [point(place - half * 0.9, box[1]), point(place + half * 0.9, box[0])];
    if (line && tick !== null) stroke("muted", 1, [[place, line[0]], [place, line[1]]]);
    context.fillStyle = colour(style);
    context.fillRect(Math.min(left, right), Math.min(top, bottom), Math.abs(right - left) || ratio, Math.abs(bottom - top));
    if (dot !== null) context.beginPath(), context.arc(...point(place, dot), 2.5 * ratio, 0, 7), context.fill();
    if (tick !== null) stroke("ink", 2, [[place - half, tick], [place + half, tick]]);
    else if (line) {
      const ends = line.map((value) => [[place - half / 3, value], [place + half / 3, value]]);
      stroke("ink", 1, [[place, line[0]], [place, line[1]]], ...ends);
    }
    if (!chart.is_horizontal) continue;
    context.fillStyle = colour("ink");
    context.font = FONT.replace("11", String(11 * ratio));
    context.textAlign = "left";
    context.textBaseline = "bottom";
    context.fillText(name, plot.bbox.left, point(place - half * 1.3, 0)[1], plot.bbox.width);
  }
  if (chart.mark_at !== null) stroke("ink", 1, [[-0.5, chart.mark_at], [chart.groups.length - 0.5, chart.mark_at]]);
  context.restore();
}

function draw(root, chart) {
  const marks = placed(chart);
  const values = marks.flatMap(({ box, line, dot }) => [...box, ...(line ?? []), dot ?? 0]).filter((value) => value > 0);
  const high = Math.max(chart.mark_at ?? 0, ...values) || 1;
  const isLog = chart.is_time && high / Math.min(...values) >= LOG_FROM;
  const caption = root.nextElementSibling;
  const unit = chart.unit + (isLog ? ", logarithmic" : "");
  const axis = { stroke: () => colour("muted"), ticks: { show: false }, font: FONT, gap: 4 };
  const groups = { ...axis, grid: { show: false }, size: 20, side: chart.is_horizontal ? 3 : 2, show: !chart.is_horizontal,
    splits: () => chart.groups.map((_, index) => index), values: () => chart.groups.map(([name]) => name) };
  const figures = { ...axis, grid: { stroke: () => colour("line"), width: 1 }, side: chart.is_horizontal ? 2 : 3,
    size: chart.is_horizontal ? 20 : 44, space: 32, values: (_, splits) => splits.map((value) => value === null ? "" : short(value)) };
  const size = () => ({ width: root.clientWidth, height: chart.is_horizontal ? chart.groups.length * ROW_PX + 34 : 170 });
  const plot = new uPlot({
    ...size(),
    padding: [8, 12, chart.is_horizontal ? 0 : 4, chart.is_horizontal ? 8 : 0],
    legend: { show: false },
    cursor: { x: false, y: false, drag: { x: false, y: false }, points: { show: false } },
    scales: {
      x: { time: false, range: [-0.5, chart.groups.length - 0.5], ori: chart.is_horizontal ? 1 : 0, dir: chart.is_horizontal ? -1 : 1 },
      y: { range: () => isLog ? uPlot.rangeLog(Math.min(...values), high, 10, true) : [0, chart.top ?? high * 1.05],
        distr: isLog ? 3 : 1, ori: chart.is_horizontal ? 0 : 1 },
    },
    axes: [groups, figures],
    series: [{}, { paths: () => null, points: { show: false } }],
    hooks: {
      draw: [(self) => drawMarks(self, chart, marks)],
      setCursor: [({ cursor }) => { caption.textContent = marks[cursor.idx]?.note ?? unit; }],
    },
  }, [marks.map(({ place }) => place), marks.map(({ box }) => box[1])], root);
  new ResizeObserver(() => { if (root.clientWidth > 0) plot.setSize(size()); }).observe(root);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plot.redraw(false));
}

const { charts } = JSON.parse(document.getElementById("data").textContent);
document.querySelectorAll(".plot").forEach((root, index) => draw(root, charts[index]));
