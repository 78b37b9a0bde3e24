package engine

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/google/go-cmp/cmp"
)

func readAll(t *testing.T, text string, lim SSELimits) ([]string, error) {
	t.Helper()
	var got []string
	err := ReadSSE(iotest.OneByteReader(strings.NewReader(text)), lim, func(e SSEEvent) error {
		switch {
		case e.Comment:
			got = append(got, "#")
		case e.Cut:
			got = append(got, "cut:"+string(e.Data))
		default:
			got = append(got, e.Name+"|"+string(e.Data))
		}
		return nil
	})
	return got, err
}

func TestEventsAreReadHoweverTheyAreWritten(t *testing.T) {
	for name, c := range map[string]struct {
		in   string
		want []string
	}{
		"plain":                              {"data: {\"a\":1}\n\ndata: [DONE]\n\n", []string{`|{"a":1}`, "|[DONE]"}},
		"CRLF":                               {"data: x\r\n\r\ndata: y\r\n\r\n", []string{"|x", "|y"}},
		"no space after the colon":           {"data:x\n\n", []string{"|x"}},
		"comments":                           {":\n\n: ping\n\ndata: x\n\n", []string{"#", "#", "|x"}},
		"named, with id and retry":           {"id: 4\nretry: 5\nevent: error\ndata: x\n\ndata: y\n\n", []string{"error|x", "|y"}},
		"data over several lines":            {"data: {\ndata: \"a\":1}\n\n", []string{"|{\n\"a\":1}"}},
		"no empty line between objects":      {"data: {\"a\":1}\ndata: {\"b\":2}\ndata: [DONE]\n", []string{`|{"a":1}`, `|{"b":2}`, "|[DONE]"}},
		"end without an empty line":          {"data: [DONE]\n", []string{"|[DONE]"}},
		"cut inside a line":                  {"data: x\n\ndata: {\"id", []string{"|x", `cut:{"id`}},
		"nothing":                            {"", nil},
		"empty lines and what is no field":   {"\n\nhello\n\n", nil},
		"an event name with no data is none": {"event: ping\n\ndata: x\n\n", []string{"|x"}},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := readAll(t, c.in, SSELimits{})
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(c.want, got); d != "" {
				t.Error(d)
			}
		})
	}
}

func TestALineOfSeveralMiBIsReadAndALongerOneRefused(t *testing.T) {
	long := strings.Repeat("x", 5<<20)
	n := 0
	if err := ReadSSE(strings.NewReader("data: "+long+"\n\n"), SSELimits{}, func(e SSEEvent) error {
		n = len(e.Data)
		return nil
	}); err != nil || n != len(long) {
		t.Fatalf("read %d bytes, error %v", n, err)
	}
	for name, lim := range map[string]SSELimits{"event": {MaxEvent: 1 << 20}, "stream": {MaxTotal: 1 << 20}} {
		err := ReadSSE(strings.NewReader("data: "+long+"\n\n"), lim, func(SSEEvent) error { return nil })
		if !errors.Is(err, ErrSSETooLarge) {
			t.Errorf("over the limit of the %s: got %v", name, err)
		}
	}
	// Many short lines of one event are bounded too.
	err := ReadSSE(strings.NewReader(strings.Repeat("data: {{{{\n", 1000)), SSELimits{MaxEvent: 1000}, func(SSEEvent) error { return nil })
	if !errors.Is(err, ErrSSETooLarge) {
		t.Errorf("an event of many lines: got %v", err)
	}
}

func TestAHandlerEndsTheReading(t *testing.T) {
	seen := 0
	if err := ReadSSE(strings.NewReader("data: a\n\ndata: b\n\n"), SSELimits{}, func(SSEEvent) error {
		seen++
		return ErrStopSSE
	}); err != nil || seen != 1 {
		t.Fatalf("saw %d events, error %v", seen, err)
	}
	mine := errors.New("mine")
	if err := ReadSSE(strings.NewReader("data: a\n\n"), SSELimits{}, func(SSEEvent) error { return mine }); !errors.Is(err, mine) {
		t.Fatalf("got %v", err)
	}
	if err := ReadSSE(iotest.ErrReader(mine), SSELimits{}, nil); !errors.Is(err, mine) {
		t.Fatalf("an error of the reader: got %v", err)
	}
}

func FuzzReadSSE(f *testing.F) {
	for _, s := range []string{"data: {\"a\":1}\n\n", ":\r\n\r\ndata:x\r\n", "data: [DONE]", "event: e\ndata\n\n"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		total := 0
		err := ReadSSE(strings.NewReader(string(b)), SSELimits{MaxEvent: 1 << 10, MaxTotal: 1 << 12}, func(e SSEEvent) error {
			if len(e.Data) > 1<<10 {
				return fmt.Errorf("an event of %d bytes came through", len(e.Data))
			}
			total += len(e.Data)
			return nil
		})
		if err != nil && !errors.Is(err, ErrSSETooLarge) {
			t.Fatal(err)
		}
		if total > 1<<12 {
			t.Fatalf("%d bytes came through", total)
		}
	})
}
