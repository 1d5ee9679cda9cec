// The reader of pictures: pixels(strokes), what a pen drew as 8 rows of 8 numbers from 0, paper, to 16, ink. As the data were made
// (Alpaydin and Kaynak 1998): a bitmap of 32 by 32 dots that the digit fills, of which a pixel counts the ink in 4 by 4.
const PEN = 2.7;  // its radius, about that of the data
const pixels = strokes => {
  const ends = axis => { const all = strokes.flat().map(point => point[axis]); return [Math.min(...all), Math.max(...all)]; };
  const [[left, right], [top, bottom]] = [0, 1].map(ends), scale = (32 - 2 * PEN) / Math.max(right - left, bottom - top, 1);
  const place = ([x, y]) => [16 + scale * (x - (left + right) / 2), 16 + scale * (y - (top + bottom) / 2)];
  const lines = strokes.flatMap(stroke => stroke.map((end, i) => [place(stroke[Math.max(i - 1, 0)]), place(end)]));
  const inked = (x, y) => lines.some(([[ax, ay], [bx, by]]) => {
    const dx = bx - ax, dy = by - ay, along = Math.min(1, Math.max(0, ((x - ax) * dx + (y - ay) * dy) / (dx * dx + dy * dy || 1)));
    return Math.hypot(ax + along * dx - x, ay + along * dy - y) <= PEN;
  });
  const eight = [...Array(8).keys()], dots = [.5, 1.5, 2.5, 3.5];
  return eight.map(row => eight.map(column => dots.flatMap(y => dots.filter(x => inked(4 * column + x, 4 * row + y))).length));
};
const read = ({file, run}) => ({classes: file.classes, look: image => run({pixels: image})});
