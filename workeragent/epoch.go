package workeragent

import (
	"crypto/rand"
	"fmt"
	"strconv"
	"strings"
)

// epoch names one life of an engine's cache under one life of its agent:
//
//	<start>.<life>-<mark>
//
// start is the stream sequence of the agent's first registration of that engine
// (0 until it is known), which orders agents without a clock. life counts the
// engine's restarts seen by this agent. mark tells agents apart whatever
// happens to a stream.
type epoch struct {
	start uint64
	life  int
	mark  string
}

// newMark draws a mark; 8 characters of base32 are 40 random bits.
func newMark() string { return strings.ToLower(rand.Text()[:8]) }

func (e epoch) String() string { return fmt.Sprintf("%d.%d-%s", e.start, e.life, e.mark) }

// parseEpoch reads what String wrote; ok is false for what another program wrote.
func parseEpoch(s string) (e epoch, ok bool) {
	numbers, mark, ok := strings.Cut(s, "-")
	if !ok || mark == "" {
		return epoch{}, false
	}
	start, life, ok := strings.Cut(numbers, ".")
	if !ok {
		return epoch{}, false
	}
	var err error
	if e.start, err = strconv.ParseUint(start, 10, 64); err != nil {
		return epoch{}, false
	}
	if e.life, err = strconv.Atoi(life); err != nil || e.life < 0 {
		return epoch{}, false
	}
	e.mark = mark
	return e, true
}

// startOf orders a registration among the agents of an engine: the start that
// its epoch names, else the sequence at which it stands.
func startOf(epochText string, revision uint64) uint64 {
	if e, ok := parseEpoch(epochText); ok && e.start != 0 {
		return e.start
	}
	return revision
}
