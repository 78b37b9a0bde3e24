package kvevents

import (
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
)

func TestAViewIsServedOverNATS(t *testing.T) {
	ns, err := server.NewServer(&server.Options{DontListen: true, NoSigs: true})
	if err != nil {
		t.Fatal(err)
	}
	ns.Start()
	defer func() { ns.Shutdown(); ns.WaitForShutdown() }()
	if !ns.ReadyForConnections(5 * time.Second) {
		t.Fatal("the server does not start")
	}
	nc, err := nats.Connect("", nats.InProcessServer(ns))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	changes, err := nc.SubscribeSync("cache.e1")
	if err != nil {
		t.Fatal(err)
	}
	v := NewView("ep", Publisher(nc, "cache.e1"))
	sub, err := AnswerSnapshots(nc, "snapshot.e1", v)
	if err != nil {
		t.Fatal(err)
	}
	defer sub.Unsubscribe()
	x := NewIndex(IndexConfig{Model: "m"}, v, nil)
	apply(x, 0, chained(0, 3)...)
	m, err := changes.NextMsg(5 * time.Second)
	if err != nil {
		t.Fatal(err)
	}
	c, err := DecodeChange(m.Data, nil)
	if err != nil || c.Seq != 1 || len(c.Blocks) != 3 {
		t.Errorf("%+v %v", c, err)
	}
	r, err := nc.Request("snapshot.e1", nil, 5*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	p, err := DecodePart(r.Data, nil)
	if err != nil || !p.Last || p.AsOf != 1 || len(p.Blocks) != 3 || p.Epoch != "ep" {
		t.Errorf("%+v %v", p, err)
	}
}
