package picture

import (
	"fmt"
	"math"
	"strings"
)

// Line is one line of a chart.
type Line struct {
	Name string
	X, Y []float64
}

// Lines draws lines over one pair of axes.
func Lines(title string, x, y Axis, lines []Line) string {
	lines = lines[:min(len(lines), rowsMax)]
	names := make([]string, len(lines))
	for i, l := range lines {
		names[i] = l.Name
	}
	c := begin(title, height+legendLine*legendRows(names)+6)
	c.x = newScale(x, func(yield func(float64)) { each(lines, func(l Line) []float64 { return l.X }, yield) })
	c.y = newScale(y, func(yield func(float64)) { each(lines, func(l Line) []float64 { return l.Y }, yield) })
	c.yTicks()
	c.xTicks()
	for i, l := range lines {
		var p strings.Builder
		for k := range min(len(l.X), len(l.Y)) {
			if math.IsNaN(l.X[k]) || math.IsNaN(l.Y[k]) {
				continue
			}
			fmt.Fprintf(&p, "%s,%s ", px(c.px(l.X[k])), px(c.py(l.Y[k])))
		}
		fmt.Fprintf(&c.b, `<polyline points="%s" fill="none" stroke="%s" stroke-width="1.6"/>`, strings.TrimSpace(p.String()), colour(i))
	}
	c.frame()
	c.titles(x.Title, y.Title)
	c.legend(names)
	return c.end()
}

func each(lines []Line, pick func(Line) []float64, yield func(float64)) {
	for _, l := range lines {
		for _, v := range pick(l) {
			yield(v)
		}
	}
}

// Bar is one group of bars, with a value for each name of the chart; Err is the
// half width of an interval, 0 = none.
type Bar struct {
	Label  string
	Values []float64
	Err    []float64
}

// Bars draws groups of bars side by side.
func Bars(title, x string, y Axis, names []string, bars []Bar) string {
	bars = bars[:min(len(bars), rowsMax)]
	c := begin(title, height+legendLine*legendRows(names)+6)
	c.y = newScale(y, func(yield func(float64)) {
		for _, b := range bars {
			for i, v := range b.Values {
				if i < len(b.Err) {
					v += b.Err[i]
				}
				yield(v)
			}
		}
	})
	c.yTicks()
	room := float64(width-left-right) / float64(max(1, len(bars)))
	each := room * 0.8 / float64(max(1, len(names)))
	for g, b := range bars {
		from := left + float64(g)*room + room*0.1
		for i, v := range b.Values {
			at := from + float64(i)*each
			fmt.Fprintf(&c.b, `<rect x="%s" y="%s" width="%s" height="%s" fill="%s"/>`, px(at), px(c.py(v)), px(max(1, each-1)), px(c.py(0)-c.py(v)), colour(i))
			if i < len(b.Err) && b.Err[i] > 0 {
				mid := at + each/2
				fmt.Fprintf(&c.b, `<path d="M%s %s V%s" stroke="#333"/>`, px(mid), px(c.py(max(0, v-b.Err[i]))), px(c.py(v+b.Err[i])))
			}
		}
		if len(bars) <= 16 || g%(1+len(bars)/16) == 0 {
			c.words(from+room*0.4, b.Label)
		}
	}
	c.frame()
	c.titles(x, y.Title)
	c.legend(names)
	return c.end()
}

// words writes a label below an axis, a word a line, so that many stand side by side.
func (c *canvas) words(x float64, label string) {
	words := strings.SplitN(label, " ", 3)
	for i, w := range words {
		fmt.Fprintf(&c.b, `<text x="%s" y="%d" text-anchor="middle" font-size="10">%s</text>`, px(x), height-bottom+12+11*i, esc(w))
	}
}

const (
	maxCols = 300
	maxRows = 128
	keyRoom = 26
)

// Heat draws a row for each engine and a column for each time: what value it
// had, on a scale from white to dark that stands below.
func Heat(title string, x Axis, y, unit string, until, most float64, cells [][]float64) string {
	cells = cells[:min(len(cells), maxRows)]
	c := begin(title, height+keyRoom)
	c.x = scale{Axis: x, max: max(until, 1e-9)}
	rows := max(1, len(cells))
	h := float64(height-bottom-top) / float64(rows)
	for i, row := range cells {
		cols := min(len(row), maxCols)
		w := float64(width-left-right) / float64(max(1, cols))
		for k := 0; k < cols; {
			v := row[k*len(row)/cols]
			n := 1
			for k+n < cols && row[(k+n)*len(row)/cols] == v {
				n++
			}
			fmt.Fprintf(&c.b, `<rect x="%s" y="%s" width="%s" height="%s" fill="%s"/>`,
				px(left+float64(k)*w), px(top+float64(i)*h), px(float64(n)*w+0.3), px(h+0.3), shade(v, most))
			k += n
		}
	}
	for i := 0; i < rows; i += 1 + rows/8 {
		c.text(left-6, top+(float64(i)+0.5)*h+4, "end", number(float64(i)))
	}
	step := niceStep(c.x.max)
	for v := 0.0; v <= c.x.max; v += step {
		c.text(c.px(v), height-bottom+16, "middle", number(v))
	}
	c.frame()
	c.titles(x.Title, y)
	for i := range 20 {
		v := most * float64(i) / 19
		fmt.Fprintf(&c.b, `<rect x="%d" y="%d" width="10" height="12" fill="%s"/>`, left+60+i*10, height+4, shade(v, most))
	}
	c.text(left+54, height+14, "end", "0")
	c.text(left+266, height+14, "start", number(most)+" "+unit)
	return c.end()
}

func shade(v, most float64) string {
	f := 0.0
	if most > 0 {
		f = min(1, max(0, v/most))
	}
	mix := func(from, to float64) int { return int(from + float64((to-from)*f) + 0.5) }
	return fmt.Sprintf("#%02x%02x%02x", mix(247, 8), mix(251, 48), mix(255, 107))
}
