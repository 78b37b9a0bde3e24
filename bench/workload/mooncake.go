package workload

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"time"
)

// BlockTokens is what one hash id of a Mooncake trace stands for.
const BlockTokens = 512

// Bounds of a trace.
const (
	MaxLine  = 4 << 20 // bytes
	MaxRows  = 2_000_000
	MaxInput = 1 << 26 // tokens of a row
	maxScale = BlockTokens
)

// Row is a line of a Mooncake trace. The number of hash ids is input_length /
// 512 rounded up, so that the last may stand for a partial block; equal ids
// mean equal blocks after equal blocks.
//
// The keys from job on are ours, all optional; readers of Mooncake's format
// leave them aside.
type Row struct {
	Timestamp    int64    `json:"timestamp"` // ms since the start
	InputLength  int      `json:"input_length"`
	OutputLength int      `json:"output_length"`
	HashIDs      []uint64 `json:"hash_ids"`

	Job        string `json:"job,omitempty"`
	Group      string `json:"group,omitempty"`      // samples of one prompt
	Sample     int    `json:"sample,omitempty"`     // number in the group, from 0
	Trajectory string `json:"trajectory,omitempty"` // turns of one conversation
	Turn       int    `json:"turn,omitempty"`       // from 1
	GapMS      int64  `json:"gap_ms,omitempty"`     // between the answer before and this turn, for closed loops
	Step       int64  `json:"step,omitempty"`       // training step
}

// ErrTrace wraps every error about the content of a trace.
var ErrTrace = errors.New("bad trace")

// LineError says which line of a trace is wrong, counted from 1.
type LineError struct {
	Line int
	Err  error
}

func (e *LineError) Error() string   { return fmt.Sprintf("line %d: %v", e.Line, e.Err) }
func (e *LineError) Unwrap() []error { return []error{ErrTrace, e.Err} }

// Rows reads a trace line by line and ends at the first error. Empty lines are
// skipped.
func Rows(r io.Reader) iter.Seq2[Row, error] {
	return func(yield func(Row, error) bool) {
		var last int64
		for line, err := range lines(r) {
			var row Row
			if err == nil {
				row, err = parseRow(line.text, last)
			}
			if err != nil {
				yield(Row{}, &LineError{line.n, err})
				return
			}
			last = row.Timestamp
			if !yield(row, nil) {
				return
			}
		}
	}
}

type numbered struct {
	n    int
	text []byte
}

// lines yields the lines that are not empty, at most MaxRows of at most MaxLine.
func lines(r io.Reader) iter.Seq2[numbered, error] {
	return func(yield func(numbered, error) bool) {
		sc := bufio.NewScanner(r)
		sc.Buffer(make([]byte, 0, 64<<10), MaxLine)
		n, rows := 0, 0
		for sc.Scan() {
			n++
			text := bytes.TrimSpace(sc.Bytes())
			if len(text) == 0 {
				continue
			}
			if rows++; rows > MaxRows {
				yield(numbered{n: n}, fmt.Errorf("more than %d rows: cut the trace", MaxRows))
				return
			}
			if !yield(numbered{n, text}, nil) {
				return
			}
		}
		switch err := sc.Err(); {
		case errors.Is(err, bufio.ErrTooLong):
			yield(numbered{n: n + 1}, fmt.Errorf("longer than %d bytes", MaxLine))
		case err != nil:
			yield(numbered{n: n + 1}, err)
		}
	}
}

func strict(text []byte, v any) error {
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("something follows the object")
	}
	return nil
}

func parseRow(text []byte, last int64) (Row, error) {
	var must struct {
		Timestamp    *json.RawMessage `json:"timestamp"`
		InputLength  *json.RawMessage `json:"input_length"`
		OutputLength *json.RawMessage `json:"output_length"`
		HashIDs      *json.RawMessage `json:"hash_ids"`
	}
	var row Row
	if err := strict(text, &row); err != nil {
		return Row{}, err
	}
	_ = json.Unmarshal(text, &must) // it has just been read
	var errs []error
	check := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	check(must.Timestamp != nil, "timestamp is missing")
	check(must.InputLength != nil, "input_length is missing")
	check(must.OutputLength != nil, "output_length is missing")
	check(must.HashIDs != nil, "hash_ids is missing")
	if len(errs) > 0 {
		return Row{}, errors.Join(errs...)
	}
	check(row.Timestamp >= last, "timestamp %d comes after %d: sort the trace by timestamp, from 0", row.Timestamp, last)
	check(row.Timestamp <= int64(1<<62/time.Millisecond), "timestamp %d: no time in milliseconds", row.Timestamp)
	check(row.InputLength >= 1 && row.InputLength <= MaxInput, "input_length %d: give 1 to %d", row.InputLength, MaxInput)
	check(row.OutputLength >= 1 && row.OutputLength <= MaxInput, "output_length %d: give 1 to %d", row.OutputLength, MaxInput)
	blocks := (max(row.InputLength, 0) + BlockTokens - 1) / BlockTokens
	check(len(row.HashIDs) == blocks, "%d hash_ids for %d tokens: one for each %d is %d", len(row.HashIDs), row.InputLength, BlockTokens, blocks)
	check(row.Turn >= 0 && row.Sample >= 0 && row.GapMS >= 0 && row.Step >= 0, "a negative turn, sample, gap_ms or step")
	check(row.Trajectory != "" || row.Turn == 0, "turn %d without a trajectory", row.Turn)
	check(row.Trajectory == "" || row.Turn >= 1, "trajectory %q without a turn: count them from 1", row.Trajectory)
	return row, errors.Join(errs...)
}

// Write writes rows as lines.
func Write(w io.Writer, rows []Row) error {
	b := bufio.NewWriter(w)
	e := json.NewEncoder(b)
	for i := range rows {
		if err := e.Encode(&rows[i]); err != nil {
			return fmt.Errorf("write row %d of a trace: %w", i+1, err)
		}
	}
	return b.Flush()
}

// TraceOptions say how rows become rollouts.
type TraceOptions struct {
	Name string
	Job  string // of rows that name none; default "trace"
	// Scale divides every length, blocks too, so that hits stay what they were;
	// default 1, at most 512. Lengths are rounded up.
	Scale int
	// Limit takes the first rows only; 0 = all.
	Limit int
	// Chained: turns wait for the answer before them and their gap, instead of
	// their timestamp.
	Chained bool
}

// ReadTrace reads a Mooncake trace as an open-loop workload.
func ReadTrace(r io.Reader, o TraceOptions) (Workload, error) {
	var rows []Row
	for row, err := range Rows(r) {
		if err != nil {
			return Workload{}, fmt.Errorf("trace %s: %w", o.Name, err)
		}
		rows = append(rows, row)
		if len(rows) == o.Limit {
			break
		}
	}
	return FromRows(rows, o)
}

// FromRows makes rollouts of rows; ids are row numbers.
func FromRows(rows []Row, o TraceOptions) (Workload, error) {
	if o.Scale == 0 {
		o.Scale = 1
	}
	if o.Scale < 1 || o.Scale > maxScale {
		return Workload{}, fmt.Errorf("trace %s: scale %d: give 1 to %d", o.Name, o.Scale, maxScale)
	}
	if o.Job == "" {
		o.Job = "trace"
	}
	w := Workload{Name: o.Name, Rollouts: make([]Rollout, 0, len(rows))}
	last := map[[2]string]int{} // row of the newest turn, by job and trajectory
	sizes := map[[2]string]int{}
	for i, row := range rows {
		job := row.Job
		if job == "" {
			job = o.Job
		}
		x := Rollout{Job: job, ID: fmt.Sprintf("%06d", i+1), Output: ceil(row.OutputLength, o.Scale), Prompt: segments(row, o.Scale),
			At: time.Duration(row.Timestamp) * time.Millisecond, Step: row.Step, Group: row.Group, Index: row.Sample,
			Trajectory: row.Trajectory, Turn: row.Turn}
		if row.Group != "" {
			k := [2]string{job, row.Group}
			sizes[k] = max(sizes[k], row.Sample+1)
		}
		if row.Trajectory != "" {
			k := [2]string{job, row.Trajectory}
			before, seen := last[k]
			switch {
			case seen && w.Rollouts[before].Turn+1 != row.Turn || !seen && row.Turn != 1:
				return Workload{}, fmt.Errorf("trace %s, row %d: %w: turn %d of trajectory %q does not follow the turn before",
					o.Name, i+1, ErrTrace, row.Turn, row.Trajectory)
			case seen:
				w.Rollouts[before].Last = false
				if o.Chained {
					x.After, x.Gap = w.Rollouts[before].ID, time.Duration(row.GapMS)*time.Millisecond
				}
			}
			x.Last = true
			last[k] = i
		}
		w.Rollouts = append(w.Rollouts, x)
	}
	for i := range w.Rollouts {
		r := &w.Rollouts[i]
		r.Size = sizes[[2]string{r.Job, r.Group}]
	}
	limit(w.Rollouts)
	return w, nil
}

func ceil(n, by int) int { return (n + by - 1) / by }

func segments(row Row, scale int) []Segment {
	out := make([]Segment, len(row.HashIDs))
	for i, id := range row.HashIDs {
		n := min(BlockTokens, row.InputLength-i*BlockTokens)
		out[i] = Segment{ID: id, Tokens: ceil(n, scale)}
	}
	return out
}

// ToRows writes a workload as a trace: prompts are cut into blocks of 512,
// and later turns get the time at which they would come if every token took
// perToken.
func (w *Workload) ToRows(perToken time.Duration) []Row {
	ids := map[uint64]uint64{}
	at := map[string]time.Duration{} // when a rollout is done
	rows := make([]Row, 0, len(w.Rollouts))
	for i := range w.Rollouts {
		r := &w.Rollouts[i]
		start := r.At
		if r.After != "" {
			start = at[r.Job+"."+r.After] + r.Gap
		}
		at[r.Job+"."+r.ID] = start + time.Duration(r.Output)*perToken
		n := r.PromptTokens()
		row := Row{Timestamp: start.Milliseconds(), InputLength: n, OutputLength: r.Output, Job: r.Job, Group: r.Group,
			Sample: r.Index, Trajectory: r.Trajectory, Turn: r.Turn, GapMS: r.Gap.Milliseconds(), Step: r.Step}
		names := Names(nil, 0, padded(r.Prompt, n), BlockTokens)
		row.HashIDs = names
		rows = append(rows, row)
	}
	sortRows(rows)
	for _, row := range rows {
		for i, name := range row.HashIDs {
			id, ok := ids[name]
			if !ok {
				id = uint64(len(ids))
				ids[name] = id
			}
			row.HashIDs[i] = id
		}
	}
	return rows
}

// padded fills the last block, so that a partial one gets a name of its own.
func padded(prompt []Segment, tokens int) []Segment {
	rest := tokens % BlockTokens
	if rest == 0 {
		return prompt
	}
	return append(prompt[:len(prompt):len(prompt)], Segment{ID: 1<<62 | uint64(tokens), Tokens: BlockTokens - rest})
}
