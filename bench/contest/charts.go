package contest

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/rollbus/rollbus/bench/picture"
)

// fleetPictures show what each engine of a contender's first seed ran and queued.
func (r *Report) fleetPictures(rows ...*Row) {
	for _, row := range rows {
		if row == nil || row.example == nil {
			continue
		}
		o := row.example
		running, most := cells(o.Fleet.Running)
		waiting, deep := cells(o.Fleet.Waiting)
		until := o.Fleet.Every.Seconds() * float64(len(o.Fleet.Running))
		at := picture.Axis{Title: "time since the first request (s)"}
		r.Pictures = append(r.Pictures,
			Picture{picture.Heat(row.Name+": running requests per engine", at, "engine", "running", until, most, running),
				fmt.Sprintf("%s kept %s of the fleet's engine time busy; on average %.1f requests ran on an engine.", row.Name, percent(busyShare(o)), meanOf(o.Fleet.Running))},
			Picture{picture.Heat(row.Name+": waiting requests per engine", at, "engine", "waiting", until, deep, waiting),
				fmt.Sprintf("At most %.0f requests waited inside one engine of %s.", deep, row.Name)})
	}
}

func busyShare(o *Outcome) float64 {
	all, busy := 0.0, 0.0
	for _, row := range o.Fleet.Running {
		for _, n := range row {
			all++
			if n > 0 {
				busy++
			}
		}
	}
	return ratio(busy, all)
}

func meanOf(m [][]int) float64 {
	n, sum := 0.0, 0.0
	for _, row := range m {
		for _, v := range row {
			n++
			sum += float64(v)
		}
	}
	return ratio(sum, n)
}

// cells turns samples by time into rows by engine, and tells the greatest.
func cells(samples [][]int) (rows [][]float64, most float64) {
	if len(samples) == 0 {
		return nil, 0
	}
	rows = make([][]float64, len(samples[0]))
	for i := range rows {
		for _, s := range samples {
			rows[i] = append(rows[i], float64(s[i]))
			most = max(most, float64(s[i]))
		}
	}
	return rows, most
}

// sharePicture shows who answered how much.
func (r *Report) sharePicture(rows ...*Row) {
	var names []string
	var bars []picture.Bar
	worst, who := 0.0, ""
	for _, row := range present(rows) {
		names = append(names, row.Name)
		shares := row.example.shares()
		for i, s := range shares {
			if i == len(bars) {
				bars = append(bars, picture.Bar{Label: strconv.Itoa(i)})
			}
			bars[i].Values = append(bars[i].Values, 100*s)
		}
		if m := slices.Max(shares) * float64(len(shares)); m > worst {
			worst, who = m, row.Name
		}
	}
	r.Pictures = append(r.Pictures, Picture{picture.Bars("Share of the requests that each engine answered", "engine", picture.Axis{Title: "requests (%)"}, names, bars),
		fmt.Sprintf("The most uneven of these is %s: one engine answered %.2f times its fair share.", who, worst)})
}

// hitPicture shows the cached share of prompts over time, of rollouts as they ended.
func (r *Report) hitPicture(rows ...*Row) {
	var lines []picture.Line
	var text []string
	for _, row := range present(rows) {
		l := picture.Line{Name: row.Name}
		prompt, cached := 0.0, 0.0
		done := row.example.Done
		step := max(1, len(done)/200)
		for i := range done {
			prompt, cached = prompt+float64(done[i].Prompt), cached+float64(done[i].Cached)
			if i%step == step-1 || i == len(done)-1 {
				l.X, l.Y = append(l.X, done[i].Ended.Seconds()), append(l.Y, 100*ratio(cached, prompt))
			}
		}
		lines = append(lines, l)
		text = append(text, fmt.Sprintf("%s %s", row.Name, percent(ratio(cached, prompt))))
	}
	r.Pictures = append(r.Pictures, Picture{picture.Lines("Prompt tokens found in the cache, of all so far", picture.Axis{Title: "time since the first request (s)"},
		picture.Axis{Title: "cached (%)"}, lines), "In the end: " + strings.Join(text, ", ") + "."})
}

// latencyPicture is the distribution of the time from release to answer, of
// trajectories where there are some.
func (r *Report) latencyPicture(what string, rows ...*Row) {
	var lines []picture.Line
	best, name := 0.0, ""
	for _, row := range present(rows) {
		v := spans(row.example)
		l := picture.Line{Name: row.Name}
		step := max(1, len(v)/200)
		for i := 0; i < len(v); i += step {
			l.X, l.Y = append(l.X, v[i]), append(l.Y, 100*float64(i+1)/float64(len(v)))
		}
		lines = append(lines, l)
		if p := at(v, 0.9); name == "" || p < best {
			best, name = p, row.Name
		}
	}
	r.Pictures = append(r.Pictures, Picture{picture.Lines("How many "+what+" ended within a time", picture.Axis{Title: "time from the first release to the answer (s)"},
		picture.Axis{Title: what + " (%)"}, lines), fmt.Sprintf("90 %% of the %s ended soonest with %s: within %.3g s.", what, name, best)})
}

// spans are the sorted times of whole trajectories and single rollouts.
func spans(o *Outcome) []float64 {
	begun := map[string]float64{}
	var out []float64
	for _, d := range o.released() {
		k := d.Rollout.Job + "." + d.Rollout.Trajectory
		if d.Rollout.Turn <= 1 {
			begun[k] = d.At.Seconds()
		}
		switch {
		case d.Rollout.Trajectory == "":
			out = append(out, (d.Ended - d.At).Seconds())
		case d.Rollout.Last:
			out = append(out, d.Ended.Seconds()-begun[k])
		}
	}
	slices.Sort(out)
	return out
}

// barPicture compares all contenders by one figure.
func (r *Report) barPicture(figure string) {
	f := 1.0
	if percents[figure] {
		f = 100
	}
	var bars []picture.Bar
	for _, row := range r.Contenders {
		s := row.Figures[figure]
		bars = append(bars, picture.Bar{Label: strings.ReplaceAll(row.Name, "_", " "), Values: []float64{s.Mean * f}, Err: []float64{s.CI95 * f}})
	}
	sorted := slices.Clone(r.Contenders)
	slices.SortStableFunc(sorted, func(a, b *Row) int {
		switch d := a.Figures[figure].Mean - b.Figures[figure].Mean; {
		case d < 0:
			return -1
		case d > 0:
			return 1
		}
		return 0
	})
	least, most := sorted[0], sorted[len(sorted)-1]
	r.Pictures = append(r.Pictures, Picture{picture.Bars(FigureName(figure)+", mean of the seeds with its 95 % interval", "contender",
		picture.Axis{Title: FigureName(figure)}, []string{FigureName(figure)}, bars),
		fmt.Sprintf("Least: %s (%s); most: %s (%s).", least.Name, FigureText(figure, least.Figures[figure]), most.Name, FigureText(figure, most.Figures[figure]))})
}

func present(rows []*Row) []*Row {
	var out []*Row
	for _, r := range rows {
		if r != nil && r.example != nil && len(r.example.Done) > 0 && !slices.Contains(out, r) {
			out = append(out, r)
		}
	}
	return out
}

func percent(v float64) string { return fmt.Sprintf("%.1f %%", 100*v) }
