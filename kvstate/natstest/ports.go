package natstest

import (
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"
	"sync"
	"testing"
)

// Ports are taken from below those that systems hand out for outgoing
// connections: a stopped server's port must still be free when it starts again.
const (
	firstPort = 10_000
	lastPort  = 32_000
)

var (
	portsMu sync.Mutex
	ports   = map[int]bool{} // given out by this process
)

// freePorts are ports that nobody listens on and that no other test of this
// process has.
func freePorts(tb testing.TB, count int) []int {
	tb.Helper()
	portsMu.Lock()
	defer portsMu.Unlock()
	var out []int
	for range 10_000 {
		if len(out) == count {
			return out
		}
		p := firstPort + rand.N(lastPort-firstPort)
		if ports[p] {
			continue
		}
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", p))
		if err != nil {
			continue
		}
		l.Close()
		ports[p] = true
		out = append(out, p)
	}
	tb.Fatalf("natstest: no %d free ports from %d to %d", count, firstPort, lastPort)
	return nil
}

// unique makes a name that no other server or cluster on this machine has.
func unique(name string) string { return name + "-" + strconv.FormatUint(rand.Uint64(), 36) }
