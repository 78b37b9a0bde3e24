package dispatcher

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/rollbus/rollbus/dispatcher/core"
	"github.com/rollbus/rollbus/kvstate/natstest"
	"github.com/rollbus/rollbus/subjects"
)

// TestMalformedMessagesNeverWedgeTheirQueue puts everything that a trainer may
// send by mistake or malice in front of one good request. scenario F14
func TestMalformedMessagesNeverWedgeTheirQueue(t *testing.T) {
	b := newBench(t)
	d, f := b.faked()
	good := func(change func(*subjects.Request)) []byte {
		r := request("j", "0001")
		if change != nil {
			change(r)
		}
		return body(r)
	}
	header := func(kv ...string) nats.Header {
		h := nats.Header{}
		for i := 0; i < len(kv); i += 2 {
			h.Set(kv[i], kv[i+1])
		}
		return h
	}
	complete := func(kv ...string) nats.Header {
		f := subjects.FactsFromRequest(request("j", "0001"), subjects.Settings{})
		h := f.Header()
		for i := 0; i < len(kv); i += 2 {
			h.Set(kv[i], kv[i+1])
		}
		return h
	}
	cases := []struct {
		name   string
		msgID  string
		header nats.Header
		body   []byte
		code   string // "" = it is good
		noID   bool
	}{
		{name: "no message id", body: good(nil), code: badMsgID, noID: true},
		{name: "another job's message id", msgID: "k.0001", body: good(nil), code: badMsgID, noID: true},
		{name: "a message id without a job", msgID: "0001", body: good(nil), code: badMsgID, noID: true},
		{name: "a message id with a bind number", msgID: "j.0001#2", body: good(nil), code: badMsgID, noID: true},
		{name: "a message id of three tokens", msgID: "j.0001.x", body: good(nil), code: badMsgID, noID: true},
		{name: "an id of ours", msgID: "j._seed", body: good(nil), code: badMsgID, noID: true},
		{name: "an empty body", msgID: "j.a1", code: badRequest},
		{name: "an empty body behind complete headers", msgID: "j.a2", header: complete(), code: badRequest},
		{name: "no JSON", msgID: "j.a3", body: []byte("\x00\xff{"), code: badRequest},
		{name: "no JSON behind complete headers", msgID: "j.a4", header: complete(), body: []byte("[1,2"), code: badRequest},
		{name: "half a body behind complete headers", msgID: "j.a5", header: complete(), body: []byte(`{"id":"a5"`), code: badRequest},
		{name: "an id that is no string", msgID: "j.a6", header: complete(), body: []byte(`{"id":6,"job":"j"}`), code: badRequest},
		{name: "a list", msgID: "j.a7", body: []byte(`[]`), code: badRequest},
		{name: "neither prompt nor tokens", msgID: "j.a8", body: good(func(r *subjects.Request) { r.ID, r.Prompt = "a8", "" }), code: badRequest},
		{name: "nothing to generate", msgID: "j.a9", body: good(func(r *subjects.Request) { r.ID, r.Sampling.MaxTokens = "a9", -1 }), code: badRequest},
		{name: "another id in the body", msgID: "j.b1", body: good(nil), code: badName},
		{name: "another id in the body behind complete headers", msgID: "j.b2", header: complete(), body: good(nil), code: badName},
		{name: "another job in the body behind complete headers", msgID: "j.b3", header: complete(), body: []byte(`{"x":[{"id":1}],"job":"k","id":"b3"}`), code: badName},
		{name: "a guard of its own", msgID: "j.b4", header: header(subjects.HdrExpectLastSeq+"x", "1"), body: good(func(r *subjects.Request) { r.ID = "b4" }), code: badHeader},
		{name: "a prompt size that is no number", msgID: "j.b5", header: complete(subjects.HdrPromptTokens, "many"), body: good(func(r *subjects.Request) { r.ID = "b5" }), code: badHeader},
		{name: "hashes that do not decode", msgID: "j.b6", header: complete(subjects.HdrBlocks, "!!!"), body: good(func(r *subjects.Request) { r.ID = "b6" }), code: badHeader},
		{name: "a status of its own", msgID: "j.c1", header: complete("Status", "404", "Description", "No Messages"), body: good(func(r *subjects.Request) { r.ID = "c1" })},
		{name: "a status of its own and no facts", msgID: "j.c2", header: header("Status", "409"), body: good(func(r *subjects.Request) { r.ID = "c2" })},
		{name: "a lane of its own", msgID: "j.c3", header: complete(subjects.HdrLane, "urgent", subjects.HdrBurnt, "9", subjects.HdrBind, "7"), body: good(func(r *subjects.Request) { r.ID = "c3" })},
		{name: "too large", msgID: "j.d1", body: append(good(func(r *subjects.Request) { r.ID = "d1" }), make([]byte, subjects.MaxRequestBytes)...), code: badSize},
		{name: "a good one", msgID: "j.0001", header: complete(), body: good(nil)},
	}
	q := core.Queue{Job: "j", Lane: subjects.LaneNormal}
	for i, c := range cases {
		b.publish(b.pool.Submit("j", subjects.LaneNormal), c.msgID, c.header, c.body)
		got := b.fetchOne(f, q)
		code := ""
		if got.Bad != nil {
			code = got.Bad.Code
			if got.Bad.Message == "" || len(got.Bad.Message) > maxBadText+3 {
				t.Errorf("%s: message of %d bytes", c.name, len(got.Bad.Message))
			}
		}
		if code != c.code || (got.Facts.ID == "") != c.noID || got.Facts.Job != "j" || got.Facts.Lane != subjects.LaneNormal {
			t.Errorf("%s: code %q, want %q; facts %+v; bad %+v", c.name, code, c.code, got.Facts, got.Bad)
		}
		if got.Facts.Burnt != 0 || got.Facts.Bind != 0 {
			t.Errorf("%s: a submit was believed its attempts: %+v", c.name, got.Facts)
		}
		// Whatever it is, it can be kept, answered if it has a name, and acked.
		f.do(core.PublishDead{Handle: got.Handle, Job: "j", ID: got.Facts.ID, Code: "x", Reason: c.name})
		if a := waitFor[core.DeadAnswer](t, f, i+1, nil); a.Answer != core.OK {
			t.Errorf("%s: dead: %+v", c.name, a)
		}
		if got.Facts.ID != "" && c.code != "" {
			n := len(seen[core.ResultAnswer](f))
			f.do(core.PublishResult{Handle: got.Handle, Job: "j", ID: got.Facts.ID, Reader: got.Facts.Reader, Status: subjects.Rejected})
			if a := waitFor[core.ResultAnswer](t, f, n+1, nil); a.Answer != core.OK && a.Answer != core.Superseded {
				t.Errorf("%s: result: %+v", c.name, a)
			}
		}
		f.do(core.Ack{Handle: got.Handle})
	}
	natstest.Eventually(t, within, "an empty queue", func() bool { return b.messages(b.pool.Rollouts()) == 0 })
	bad := 0
	for _, c := range cases {
		if c.code != "" {
			bad++
		}
	}
	if n := counterValue(t, d, "rollbus_dispatcher_malformed_total", "submit"); n != float64(bad) {
		t.Errorf("%v malformed messages counted, want %d", n, bad)
	}
}

func TestABrokenRequeueIsBadAndAGoodOneIsBelieved(t *testing.T) { // scenario F14
	b := newBench(t)
	_, f := b.faked()
	q := core.Queue{Job: "j", Retry: true}
	for i, c := range []struct {
		id   string
		lane string
		code string
	}{
		{"j.0001", "batch", badMsgID}, {"j.0001#", "batch", badMsgID}, {"j.0001#0", "batch", badMsgID},
		{"j.0001#x", "batch", badMsgID}, {"j.0001#2", "fast", badHeader}, {"j.0001#3", "batch", ""},
	} {
		h := nats.Header{}
		h.Set(subjects.HdrLane, c.lane)
		h.Set(subjects.HdrBind, "3")
		h.Set(subjects.HdrLeft, "1000")
		b.publish(b.pool.RetrySubject("j"), c.id, h, body(request("j", "0001")))
		got := b.fetchOne(f, q)
		if code := codeOf(got.Bad); code != c.code {
			t.Errorf("%d: %q: code %q, want %q: %+v", i, c.id, code, c.code, got.Bad)
		}
		if c.code == "" && (got.Facts.Lane != subjects.LaneBatch || got.Facts.Bind != 3 || got.Facts.LeftMS != 1000 || got.Facts.PromptTokens == 0) {
			t.Errorf("%q: facts %+v", c.id, got.Facts)
		}
		f.do(core.Ack{Handle: got.Handle})
	}
}

func codeOf(b *core.Bad) string {
	if b == nil {
		return ""
	}
	return b.Code
}

func TestHeadersSayTheSameAsTheBody(t *testing.T) {
	b := newBench(t)
	d, _ := b.faked()
	r := request("j", "0001")
	r.Group = &subjects.Group{ID: "g", Size: 2}
	r.Trajectory = &subjects.Trajectory{ID: "t", Turn: 3}
	r.Deadline = subjects.Duration(time.Minute)
	facts := subjects.FactsFromRequest(r, subjects.Settings{})
	q := queueOf(r)
	h := facts.Header()
	h.Set(subjects.HdrMsgID, "j.0001")
	byHeader, bad1 := d.decode(h, body(r), q)
	byBody, bad2 := d.decode(nats.Header{subjects.HdrMsgID: {"j.0001"}}, body(r), q)
	if bad1 != nil || bad2 != nil || fmt.Sprintf("%+v", byHeader) != fmt.Sprintf("%+v", byBody) {
		t.Fatalf("headers %+v %v\nbody    %+v %v", byHeader, bad1, byBody, bad2)
	}
}

func FuzzDecodeNeverPanics(f *testing.F) {
	d := &Dispatcher{}
	d.settings.Store(new(subjects.Settings{}.WithDefaults()))
	f.Add("j.0001", "16", "", []byte(`{"id":"0001","job":"j"}`), false)
	f.Add("j.0001#2", "", "urgent", []byte(`{"id":`), true)
	f.Add("", "x", "", []byte(`[`), false)
	f.Fuzz(func(t *testing.T, msgID, tokens, lane string, body []byte, retry bool) {
		h := nats.Header{subjects.HdrMsgID: {msgID}, subjects.HdrPromptTokens: {tokens}, subjects.HdrMaxTokens: {tokens}, subjects.HdrReader: {"main"}, subjects.HdrLane: {lane}}
		q := core.Queue{Job: "j", Lane: subjects.LaneNormal}
		if retry {
			q = core.Queue{Job: "j", Retry: true}
		}
		facts, bad := d.decode(h, body, q)
		if facts.Job != "j" || facts.Reader == "" {
			t.Fatalf("facts %+v", facts)
		}
		if bad == nil && (!goodToken(facts.ID) || !strings.HasPrefix(msgID, "j."+facts.ID)) {
			t.Fatalf("message id %q was taken for %+v", msgID, facts)
		}
	})
}

func TestABodyThatBeginsWithItsNameNeedsNoDecoder(t *testing.T) {
	for body, want := range map[string]bool{
		`{"schema_version":1,"id":"0001","job":"j","prompt":"x"}`: true,
		`{"schema_version":1,"id":"0001","job":"j"}`:              true,
		`{"schema_version":1,"id":"0001","job":"jj"}`:             false,
		`{"schema_version":1,"id":"00010","job":"j"}`:             false,
		`{"schema_version":1,"id":"0001","job":"`:                 false,
		`{"id":"0001","job":"j"}`:                                 false,
		``:                                                        false,
	} {
		if got := beginsWithName([]byte(body), "j", "0001"); got != want {
			t.Errorf("%s: %v, want %v", body, got, want)
		}
		if _, err := checkName([]byte(body), "j", "0001"); want && err != nil {
			t.Errorf("%s is refused: %v", body, err)
		}
	}
}
