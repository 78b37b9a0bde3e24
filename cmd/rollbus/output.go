package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
)

// Output formats.
const (
	formatTable = "table"
	formatWide  = "wide"
	formatJSON  = "json"
	formatJSONL = "jsonl"
)

// printer writes data to stdout in the format asked for. Messages go elsewhere.
type printer struct {
	w      io.Writer
	format string
}

// list prints values: a table of the rows that row makes of each, one JSON
// array, or one JSON object a line.
func list[T any](p printer, head []string, values []T, row func(T) []string) error {
	switch p.format {
	case formatJSON:
		if values == nil {
			values = []T{}
		}
		return p.json(values)
	case formatJSONL:
		for _, v := range values {
			if err := p.line(v); err != nil {
				return err
			}
		}
		return nil
	}
	rows := make([][]string, 0, len(values))
	for _, v := range values {
		rows = append(rows, row(v))
	}
	return p.table(head, rows)
}

// one prints a single value: as JSON, or by table.
func (p printer) one(v any, table func() error) error {
	switch p.format {
	case formatJSON:
		return p.json(v)
	case formatJSONL:
		return p.line(v)
	}
	return table()
}

func (p printer) json(v any) error {
	enc := json.NewEncoder(p.w)
	enc.SetIndent("", "  ")
	enc.SetEscapeHTML(false)
	return enc.Encode(v)
}

func (p printer) line(v any) error {
	enc := json.NewEncoder(p.w)
	enc.SetEscapeHTML(false)
	return enc.Encode(v)
}

// shown leaves out the columns whose head starts with '+', unless the format is wide.
func (p printer) shown(head []string, rows [][]string) ([]string, [][]string) {
	var at []int
	for i, h := range head {
		if !strings.HasPrefix(h, "+") || p.format == formatWide {
			at = append(at, i)
		}
	}
	pick := func(cells []string) []string {
		out := make([]string, 0, len(at))
		for _, i := range at {
			out = append(out, cells[i])
		}
		return out
	}
	out := make([][]string, 0, len(rows))
	for _, r := range rows {
		out = append(out, pick(r))
	}
	head = pick(head)
	for i := range head {
		head[i] = strings.TrimPrefix(head[i], "+")
	}
	return head, out
}

// table aligns columns. A column whose head starts with '>' is flushed right,
// one whose head starts with '+' is for wide tables only ("+>" is both).
func (p printer) table(head []string, rows [][]string) error {
	head, rows = p.shown(head, rows)
	width := make([]int, len(head))
	right := make([]bool, len(head))
	titles := make([]string, len(head))
	for i, h := range head {
		titles[i], right[i] = strings.TrimPrefix(h, ">"), strings.HasPrefix(h, ">")
		width[i] = len(titles[i])
		for _, r := range rows {
			width[i] = max(width[i], len([]rune(r[i])))
		}
	}
	line := func(cells []string) error {
		var b strings.Builder
		for i, c := range cells {
			pad := strings.Repeat(" ", max(0, width[i]-len([]rune(c))))
			if right[i] {
				b.WriteString(pad + c)
			} else {
				b.WriteString(c + pad)
			}
			b.WriteString("  ")
		}
		_, err := fmt.Fprintln(p.w, strings.TrimRight(b.String(), " "))
		return err
	}
	for _, r := range append([][]string{titles}, rows...) {
		if err := line(r); err != nil {
			return err
		}
	}
	return nil
}

// fields prints "name  value" lines.
func (p printer) fields(pairs ...string) error {
	w := tabwriter.NewWriter(p.w, 0, 0, 2, ' ', 0)
	for i := 0; i+1 < len(pairs); i += 2 {
		fmt.Fprintf(w, "%s\t%s\n", pairs[i], pairs[i+1])
	}
	return w.Flush()
}
