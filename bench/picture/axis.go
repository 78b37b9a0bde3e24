package picture

import (
	"fmt"
	"html"
	"math"
	"strconv"
	"strings"
)

// Size of every chart and the room around its plot, pixels.
const (
	width   = 760
	height  = 300
	left    = 70
	right   = 20
	top     = 34
	bottom  = 60
	rowsMax = 64 // legend entries and bar groups
)

// colours are those of Okabe and Ito: told apart by most eyes.
var colours = [...]string{"#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#b2a300", "#7f7f7f", "#5e3c99"}

func colour(i int) string { return colours[i%len(colours)] }

// Axis is what stands along a side, with its unit.
type Axis struct {
	Title string // with its unit in brackets
	Log   bool   // powers of ten
}

type scale struct {
	Axis
	min, max float64
}

// newScale covers the values; it starts at 0 unless it is logarithmic.
func newScale(a Axis, values func(yield func(float64))) scale {
	s := scale{Axis: a, min: 0, max: 0}
	low := math.Inf(1)
	values(func(v float64) {
		if math.IsNaN(v) || math.IsInf(v, 0) {
			return
		}
		s.max = max(s.max, v)
		if v > 0 {
			low = min(low, v)
		}
	})
	switch {
	case a.Log && !math.IsInf(low, 1):
		s.min = math.Pow(10, math.Floor(math.Log10(low)))
		s.max = math.Pow(10, math.Ceil(math.Log10(s.max)))
		if s.max <= s.min {
			s.max = s.min * 10
		}
	case a.Log:
		s.min, s.max = 1, 10
	default:
		if s.max <= 0 {
			s.max = 1
		}
		step := niceStep(s.max)
		s.max = math.Ceil(s.max/step-1e-9) * step
	}
	return s
}

// niceStep is 1, 2 or 5 times a power of ten, about five of them to max.
func niceStep(most float64) float64 {
	raw := most / 5
	p := math.Pow(10, math.Floor(math.Log10(raw)))
	for _, m := range []float64{1, 2, 5, 10} {
		if raw <= m*p*1.0001 {
			return m * p
		}
	}
	return 10 * p
}

// at is a value's place, 0..1.
func (s scale) at(v float64) float64 {
	if s.Log {
		return (math.Log10(max(v, s.min)) - math.Log10(s.min)) / (math.Log10(s.max) - math.Log10(s.min))
	}
	return (v - s.min) / (s.max - s.min)
}

func (s scale) ticks() []float64 {
	var out []float64
	if s.Log {
		for v := s.min; v <= s.max*1.0001; v *= 10 {
			out = append(out, v)
		}
		return out
	}
	step := niceStep(s.max)
	for i := 0; float64(i)*step <= s.max*1.0001; i++ {
		out = append(out, float64(i)*step)
	}
	return out
}

func number(v float64) string { return strconv.FormatFloat(v, 'g', 5, 64) }

func px(v float64) string { return strconv.FormatFloat(v, 'f', 1, 64) }

func esc(s string) string { return html.EscapeString(s) }

// canvas is a chart being drawn.
type canvas struct {
	b    strings.Builder
	h    int
	x, y scale
}

func begin(title string, h int) *canvas {
	c := &canvas{h: h}
	fmt.Fprintf(&c.b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" role="img" font-family="sans-serif" font-size="12">`, width, h, width, h)
	fmt.Fprintf(&c.b, `<title>%s</title><rect width="100%%" height="100%%" fill="#fff"/>`, esc(title))
	fmt.Fprintf(&c.b, `<text x="%d" y="18" font-size="14" font-weight="bold">%s</text>`, left, esc(title))
	return c
}

func (c *canvas) end() string {
	c.b.WriteString("</svg>")
	return c.b.String()
}

func (c *canvas) px(v float64) float64 { return left + c.x.at(v)*(width-left-right) }
func (c *canvas) py(v float64) float64 {
	return float64(height-bottom) - c.y.at(v)*float64(height-bottom-top)
}

func (c *canvas) text(x, y float64, anchor, s string) {
	fmt.Fprintf(&c.b, `<text x="%s" y="%s" text-anchor="%s">%s</text>`, px(x), px(y), anchor, esc(s))
}

// titles writes what the axes mean.
func (c *canvas) titles(x, y string) {
	c.text((left+width-right)/2, height-10, "middle", x)
	fmt.Fprintf(&c.b, `<text x="16" y="%s" text-anchor="middle" transform="rotate(-90 16 %s)">%s</text>`,
		px((top+height-bottom)/2), px((top+height-bottom)/2), esc(y))
}

func (c *canvas) yTicks() {
	for _, v := range c.y.ticks() {
		fmt.Fprintf(&c.b, `<line x1="%d" y1="%s" x2="%d" y2="%s" stroke="#ddd"/>`, left, px(c.py(v)), width-right, px(c.py(v)))
		c.text(left-6, c.py(v)+4, "end", number(v))
	}
}

func (c *canvas) xTicks() {
	for _, v := range c.x.ticks() {
		fmt.Fprintf(&c.b, `<line x1="%s" y1="%d" x2="%s" y2="%d" stroke="#eee"/>`, px(c.px(v)), top, px(c.px(v)), height-bottom)
		c.text(c.px(v), height-bottom+16, "middle", number(v))
	}
}

func (c *canvas) frame() {
	fmt.Fprintf(&c.b, `<path d="M%d %d V%d H%d" fill="none" stroke="#333"/>`, left, top, height-bottom, width-right)
}

// legendRows is how many lines a legend takes; they stand below the chart.
func legendRows(names []string) int {
	rows, x := 1, left
	for _, n := range names {
		w := 34 + 7*len([]rune(n))
		if x+w > width-right && x > left {
			rows, x = rows+1, left
		}
		x += w
	}
	return rows
}

const legendLine = 18

func (c *canvas) legend(names []string) {
	x, y := left, height+4
	for i, n := range names {
		w := 34 + 7*len([]rune(n))
		if x+w > width-right && x > left {
			x, y = left, y+legendLine
		}
		fmt.Fprintf(&c.b, `<rect x="%d" y="%d" width="14" height="10" fill="%s"/>`, x, y, colour(i))
		c.text(float64(x+18), float64(y+10), "start", n)
		x += w
	}
}
