package main

import (
	"bytes"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats.go"

	"github.com/rollbus/rollbus/workeragent/kvevents"
)

func TestTapReadsACacheEvent(t *testing.T) {
	change := kvevents.Change{Epoch: "e-1", Seq: 3, Namespace: 255, Kind: kvevents.Stored, Blocks: []uint64{1 << 63, 2}, HasParent: true, Parent: 7}
	l := line("cache", &nats.Msg{Subject: "rollout.p.cache.e1", Data: kvevents.AppendChange(nil, &change)})
	want := map[string]any{
		"op": "stored", "tier": "gpu", "epoch": "e-1", "seq": uint64(3), "namespace": "00000000000000ff", "parent": "0000000000000007",
		"blocks": []string{"8000000000000000", "0000000000000002"},
	}
	if d := cmp.Diff(want, l.Facts); d != "" {
		t.Error(d)
	}
	var out bytes.Buffer
	if err := l.print(printer{w: &out}); err != nil || !strings.HasSuffix(out.String(),
		"rollout.p.cache.e1  op=stored tier=gpu epoch=e-1 seq=3 blocks=2 parent=0000000000000007\n") {
		t.Errorf("printed %q, %v", out.String(), err)
	}
	if l := line("cache", &nats.Msg{Data: []byte("nonsense")}); !strings.Contains(l.Facts["error"].(string), "malformed") {
		t.Errorf("nonsense reads as %v", l.Facts)
	}
}
