package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/rollbus/rollbus/bench/demo/local"
	simengine "github.com/rollbus/rollbus/bench/engine"
	"github.com/rollbus/rollbus/client"
	"github.com/rollbus/rollbus/kvstate"
	"github.com/rollbus/rollbus/subjects"
)

// wholePool is NATS, a dispatcher, an agent and a simulated engine, and a
// connection of somebody who does not use our library.
type wholePool struct {
	*local.Pool
	t  *testing.T
	nc *nats.Conn
	js jetstream.JetStream
}

const badJob = "math"

func startWholePool(t *testing.T) *wholePool {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	t.Cleanup(cancel)
	p, err := local.Start(ctx, local.Config{
		Pool: "default", NATS: local.NATSConfig{Dir: t.TempDir(), Listen: "127.0.0.1:0"}, Dispatchers: 1, Layout: subjects.Layout{Budget: 1 << 30},
		Settings: recommended(), Engines: []local.Engine{{Name: "e1", Sim: &simengine.Config{TimeScale: 50, Model: "sim"}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		within, done := context.WithTimeout(context.Background(), 20*time.Second)
		defer done()
		if err := p.Stop(within); err != nil {
			t.Errorf("stop: %v", err)
		}
	})
	nc, err := p.NATS.Conn("somebody")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	return &wholePool{Pool: p, t: t, nc: nc, js: js}
}

func (p *wholePool) ctx() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	p.t.Cleanup(cancel)
	return ctx
}

// submitRaw publishes bytes as they are.
func (p *wholePool) submitRaw(subject, msgID string, body []byte, headers ...string) error {
	m := &nats.Msg{Subject: subject, Data: body, Header: nats.Header{}}
	if msgID != "" {
		m.Header.Set(subjects.HdrMsgID, msgID)
	}
	for i := 0; i < len(headers); i += 2 {
		m.Header.Set(headers[i], headers[i+1])
	}
	_, err := p.js.PublishMsg(p.ctx(), m)
	return err
}

// until waits for a condition that something else brings about.
func (p *wholePool) until(what string, ok func() bool) {
	p.t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	late := time.After(30 * time.Second)
	for !ok() {
		select {
		case <-tick.C:
		case <-late:
			p.t.Fatalf("%s: not within 30 s", what)
		}
	}
}

func (p *wholePool) result(id string) *subjects.Result {
	p.t.Helper()
	var found *subjects.Result
	p.until("an answer to "+badJob+"."+id, func() bool {
		r, err := p.Store.Result(p.ctx(), badJob, subjects.DefaultReader, id)
		if errors.Is(err, kvstate.ErrGone) {
			return false
		}
		if err != nil {
			p.t.Fatal(err)
		}
		if found, err = subjects.DecodeResult(r.Body); err != nil {
			p.t.Fatal(err)
		}
		return true
	})
	return found
}

// dead reads everything that was buried.
func (p *wholePool) dead() []jetstream.Msg {
	p.t.Helper()
	var out []jetstream.Msg
	cons, err := p.js.OrderedConsumer(p.ctx(), p.Name.Dead(), jetstream.OrderedConsumerConfig{})
	if err != nil {
		p.t.Fatal(err)
	}
	for pending := cons.CachedInfo().NumPending; pending > 0; pending-- {
		m, err := cons.Next(jetstream.FetchContext(p.ctx()))
		if err != nil {
			p.t.Fatal(err)
		}
		out = append(out, m)
	}
	return out
}

// goodOne submits a rollout that must complete: nothing is stuck behind what came before.
func (p *wholePool) goodOne(id string) {
	p.t.Helper()
	c, err := client.Open(p.ctx(), p.nc, "default", badJob, client.Reader("good"))
	if err != nil {
		p.t.Fatal(err)
	}
	defer c.Close()
	r, err := c.Do(p.ctx(), &subjects.Request{ID: id, Prompt: "still there?", Sampling: subjects.SamplingParams{MaxTokens: 4}})
	if err != nil || !r.Status.Sample() {
		p.t.Fatalf("a good rollout after bad ones: %+v, %v", r, err)
	}
}

// settled: queues and reservations are empty, and the dispatcher serves.
func (p *wholePool) settled() {
	p.t.Helper()
	p.until("empty queues", func() bool {
		for _, stream := range []string{p.Name.Rollouts(), p.Name.Retry()} {
			s, err := p.js.Stream(p.ctx(), stream)
			if err != nil {
				p.t.Fatal(err)
			}
			if s.CachedInfo().State.Msgs > 0 {
				return false
			}
		}
		return true
	})
	p.until("a ready dispatcher", func() bool { return len(p.Dispatchers[0].Ready()) == 0 })
	if err := p.Agent.Ready(); err != nil {
		p.t.Errorf("the agent: %v", err)
	}
}

// badBody is a body that cannot be a rollout; %s is its id.
var badBodies = map[string]string{
	"nothing":                        "",
	"null":                           "null",
	"a-list":                         `[{"id":"%s"}]`,
	"no-members":                     `{}`,
	"half-of-it":                     `{"id":"%s","job":"math","prompt":"x","sampling_params":{"max_tok`,
	"something-behind-it":            `{"id":"%s","job":"math","prompt":"x","sampling_params":{"max_tokens":4}} {}`,
	"bytes":                          "\x00\x01\x02\xff%s",
	"max-tokens-a-word":              `{"id":"%s","job":"math","prompt":"x","sampling_params":{"max_tokens":"four"}}`,
	"prompt-a-number":                `{"id":"%s","job":"math","prompt":7,"sampling_params":{"max_tokens":4}}`,
	"ids-words":                      `{"id":"%s","job":"math","prompt_token_ids":["a"],"sampling_params":{"max_tokens":4}}`,
	"ids-negative":                   `{"id":"%s","job":"math","prompt_token_ids":[1,-2],"sampling_params":{"max_tokens":4}}`,
	"ids-huge":                       `{"id":"%s","job":"math","prompt_token_ids":[4294967296],"sampling_params":{"max_tokens":4}}`,
	"ids-fractions":                  `{"id":"%s","job":"math","prompt_token_ids":[1.5],"sampling_params":{"max_tokens":4}}`,
	"messages-an-object":             `{"id":"%s","job":"math","messages":{},"sampling_params":{"max_tokens":4}}`,
	"sampling-a-list":                `{"id":"%s","job":"math","prompt":"x","sampling_params":[4]}`,
	"group-a-word":                   `{"id":"%s","job":"math","prompt":"x","group":"g","sampling_params":{"max_tokens":4}}`,
	"no-prompt":                      `{"id":"%s","job":"math","sampling_params":{"max_tokens":4}}`,
	"empty-prompt":                   `{"id":"%s","job":"math","prompt":"","sampling_params":{"max_tokens":4}}`,
	"empty-ids":                      `{"id":"%s","job":"math","prompt_token_ids":[],"sampling_params":{"max_tokens":4}}`,
	"empty-messages":                 `{"id":"%s","job":"math","messages":[],"sampling_params":{"max_tokens":4}}`,
	"two-prompts":                    `{"id":"%s","job":"math","prompt":"x","prompt_token_ids":[1],"sampling_params":{"max_tokens":4}}`,
	"prompt-and-messages":            `{"id":"%s","job":"math","prompt":"x","messages":[{"role":"user","content":"y"}],"sampling_params":{"max_tokens":4}}`,
	"temperature-nan":                `{"id":"%s","job":"math","prompt":"x","sampling_params":{"max_tokens":4,"temperature":NaN}}`,
	"temperature-nan-text":           `{"id":"%s","job":"math","prompt":"x","sampling_params":{"max_tokens":4,"temperature":"NaN"}}`,
	"temperature-infinite":           `{"id":"%s","job":"math","prompt":"x","sampling_params":{"max_tokens":4,"temperature":1e999}}`,
	"temperature-negative":           `{"id":"%s","job":"math","prompt":"x","sampling_params":{"max_tokens":4,"temperature":-1}}`,
	"top-p-2":                        `{"id":"%s","job":"math","prompt":"x","sampling_params":{"max_tokens":4,"top_p":2}}`,
	"max-tokens-negative":            `{"id":"%s","job":"math","prompt":"x","sampling_params":{"max_tokens":-4}}`,
	"max-tokens-zero":                `{"id":"%s","job":"math","prompt":"x","sampling_params":{"max_tokens":0}}`,
	"max-tokens-missing":             `{"id":"%s","job":"math","prompt":"x"}`,
	"max-tokens-beyond-64-bits":      `{"id":"%s","job":"math","prompt":"x","sampling_params":{"max_tokens":9223372036854775808}}`,
	"max-tokens-1e30":                `{"id":"%s","job":"math","prompt":"x","sampling_params":{"max_tokens":1e30}}`,
	"max-tokens-twice":               `{"id":"%s","job":"math","prompt":"x","sampling_params":{"max_tokens":4,"max_new_tokens":4}}`,
	"four-samples":                   `{"id":"%s","job":"math","prompt":"x","sampling_params":{"max_tokens":4,"n":4}}`,
	"deadline-negative":              `{"id":"%s","job":"math","prompt":"x","deadline":"-1s","sampling_params":{"max_tokens":4}}`,
	"deadline-of-years":              `{"id":"%s","job":"math","prompt":"x","deadline":"87600h","sampling_params":{"max_tokens":4}}`,
	"attempts-negative":              `{"id":"%s","job":"math","prompt":"x","max_attempts":-1,"sampling_params":{"max_tokens":4}}`,
	"group-index-beyond-its-size":    `{"id":"%s","job":"math","prompt":"x","group":{"id":"g","index":4,"size":4},"sampling_params":{"max_tokens":4}}`,
	"group-of-a-billion":             `{"id":"%s","job":"math","prompt":"x","group":{"id":"g","size":1000000000},"sampling_params":{"max_tokens":4}}`,
	"turn-zero":                      `{"id":"%s","job":"math","prompt":"x","trajectory":{"id":"t","turn":0},"sampling_params":{"max_tokens":4}}`,
	"prompt-not-utf-8":               "{\"id\":\"%s\",\"job\":\"math\",\"prompt\":\"\xff\xfe\",\"sampling_params\":{\"max_tokens\":4}}",
	"lone-surrogate-in-the-group":    "{\"id\":\"%s\",\"job\":\"math\",\"prompt\":\"x\",\"group\":{\"id\":\"\xed\xa0\x80\"},\"sampling_params\":{\"max_tokens\":4}}",
	"nul-in-the-model":               `{"id":"%s","job":"math","prompt":"x","model":"a\u0000b","sampling_params":{"max_tokens":4}}`,
	"another-id":                     `{"id":"other","job":"math","prompt":"x","sampling_params":{"max_tokens":4}}`,
	"another-job":                    `{"id":"%s","job":"chemistry","prompt":"x","sampling_params":{"max_tokens":4}}`,
	"without-its-id":                 `{"job":"math","prompt":"x","sampling_params":{"max_tokens":4}}`,
	"without-its-job":                `{"id":"%s","prompt":"x","sampling_params":{"max_tokens":4}}`,
	"schema-of-the-future":           `{"schema_version":99,"id":"%s","job":"math","prompt":"x","sampling_params":{"max_tokens":4}}`,
	"a-reader-that-is-no-token":      `{"id":"%s","job":"math","reader":"a.b","prompt":"x","sampling_params":{"max_tokens":4}}`,
	"nested-a-hundred-thousand-deep": `{"id":"%s","job":"math","prompt":"x","sampling_params":{"max_tokens":4},"meta":` + strings.Repeat("[", 100_000) + `}`,
}

// scenario F14
func TestABodyThatCannotRunIsRejectedKeptWholeAndInNobodysWay(t *testing.T) {
	p := startWholePool(t)
	bodies := map[string][]byte{}
	for id, form := range badBodies {
		body := []byte(strings.ReplaceAll(form, "%s", id))
		bodies[id] = body
		if err := p.submitRaw(p.Name.Submit(badJob, subjects.LaneNormal), badJob+"."+id, body); err != nil {
			t.Fatalf("%s: %v", id, err)
		}
	}
	large := []byte(`{"id":"large","job":"math","prompt":"` + strings.Repeat("x", subjects.MaxRequestBytes) + `","sampling_params":{"max_tokens":4}}`)
	bodies["large"] = large
	if err := p.submitRaw(p.Name.Submit(badJob, subjects.LaneNormal), badJob+".large", large); err != nil {
		t.Fatal(err)
	}
	p.goodOne("after")
	for id := range bodies {
		r := p.result(id)
		if r.Status != subjects.Rejected || r.Error == nil || r.Error.Class != subjects.ClassData || r.Error.Code == "" || r.Error.Message == "" || r.Error.Retryable {
			t.Errorf("%s: %s %+v", id, r.Status, r.Error)
		}
		if r.Text != "" || len(r.TokenIDs) > 0 || r.Attempt != 0 {
			t.Errorf("%s ran: %+v", id, r)
		}
	}
	p.settled()
	kept := map[string]bool{}
	for _, m := range p.dead() {
		key, _, _ := strings.Cut(m.Headers().Get(subjects.HdrMsgID), "#")
		_, id, _ := subjects.SplitRolloutKey(key)
		if !bytes.Equal(m.Data(), bodies[id]) {
			t.Errorf("%s: DEAD keeps other bytes: %.200q, want %.200q", id, m.Data(), bodies[id])
		}
		if code, reason, ok := strings.Cut(m.Headers().Get(subjects.HdrError), ": "); !ok || code == "" || reason == "" {
			t.Errorf("%s: no reason in DEAD: %q", id, m.Headers().Get(subjects.HdrError))
		}
		kept[id] = true
	}
	for id := range bodies {
		if !kept[id] {
			t.Errorf("%s is not in DEAD", id)
		}
	}
}

// forged are headers that no trainer may set, or that no client would.
var forged = map[string][]string{
	"bind-not-a-number":    {subjects.HdrBind, "many"},
	"bind-negative":        {subjects.HdrBind, "-1"},
	"burnt-negative":       {subjects.HdrBurnt, "-5"},
	"tokens-negative":      {subjects.HdrPromptTokens, "-5", subjects.HdrMaxTokens, "4"},
	"tokens-nan":           {subjects.HdrPromptTokens, "NaN"},
	"tokens-huge":          {subjects.HdrPromptTokens, "99999999999999999999"},
	"deadline-huge":        {subjects.HdrDeadline, "99999999999999"},
	"blocks-not-base64":    {subjects.HdrBlocks, "!!!", subjects.HdrBlockTokens, "64"},
	"blocks-too-many":      {subjects.HdrBlocks, strings.Repeat("AAAAAAAAAAA", 3000), subjects.HdrBlockTokens, "64"},
	"weights-nonsense":     {subjects.HdrWeights, "min=x"},
	"reader-no-token":      {subjects.HdrReader, "a.b"},
	"expected-stream":      {"Nats-Expected-Stream", "ROLLOUTS_default"},
	"turn-beyond-32-bits":  {subjects.HdrTurn, "99999999999"},
	"tried-everything":     {subjects.HdrTried, "e1,_x,,E9"},
	"namespace-not-hex":    {subjects.HdrNamespace, "zz"},
	"max-attempts-a-lot":   {subjects.HdrMaxAttempts, "1000000"},
	"rank-negative":        {subjects.HdrRank, "-2"},
	"accepted-in-the-past": {subjects.HdrAccepted, "1"},
	"left-of-years":        {subjects.HdrLeft, "99999999999999"},
	"lane-of-its-own":      {subjects.HdrLane, "first"},
}

// scenario F14
func TestForgedHeadersEndInAnAnswerWhateverTheySay(t *testing.T) {
	p := startWholePool(t)
	body := func(id string) []byte {
		return fmt.Appendf(nil, `{"id":"%s","job":"math","prompt":"x","sampling_params":{"max_tokens":4}}`, id)
	}
	subject := p.Name.Submit(badJob, subjects.LaneNormal)
	for id, h := range forged {
		if err := p.submitRaw(subject, badJob+"."+id, body(id), h...); err != nil {
			t.Fatalf("%s: %v", id, err)
		}
	}
	// Headers that the server obeys are refused by it.
	for _, h := range [][]string{{"Nats-Rollup", "all"}, {subjects.HdrTTL, "1s"}, {"Nats-Expected-Last-Sequence", "123456"}} {
		if err := p.submitRaw(subject, badJob+".obeyed", body("obeyed"), h...); err == nil {
			t.Errorf("%s on a submit was accepted", h[0])
		}
	}
	// Facts that are complete and hide a body that cannot run: the agent looks.
	if err := p.submitRaw(subject, badJob+".hidden", []byte(`{"id":"hidden","job":"math","prompt":"x","prompt_token_ids":[1],"sampling_params":{"max_tokens":4}}`),
		subjects.HdrPromptTokens, "3", subjects.HdrMaxTokens, "4"); err != nil {
		t.Fatal(err)
	}
	p.goodOne("after")
	for id := range forged {
		switch r := p.result(id); {
		case r.Status == subjects.Rejected && r.Error != nil && r.Error.Class == subjects.ClassData && r.Error.Message != "":
		case r.Status.Sample() && r.Attempt >= 1 && r.Usage != nil && r.Usage.CompletionTokens == 4: // the header was of no account
		default:
			t.Errorf("%s: %s %+v", id, r.Status, r.Error)
		}
	}
	if r := p.result("hidden"); r.Status != subjects.Rejected {
		t.Errorf("a body that cannot run, behind headers that look well: %s %+v", r.Status, r.Error)
	}
	p.settled()
}

// scenario F14
func TestWhatHasNoNameIsKeptWithTheReasonAndNeverFetchedAgain(t *testing.T) {
	p := startWholePool(t)
	good := []byte(`{"id":"0001","job":"math","prompt":"x","sampling_params":{"max_tokens":4}}`)
	subject := p.Name.Submit(badJob, subjects.LaneNormal)
	names := []string{"", "0001", "math.", "math.0001.2", "math.Über", "chemistry.0001", "math.0001#1", "math." + strings.Repeat("x", 300), "math.a b"}
	for _, name := range names {
		if err := p.submitRaw(subject, name, good); err != nil {
			t.Fatalf("%q: %v", name, err)
		}
	}
	p.goodOne("after")
	p.settled()
	entries := p.dead()
	for _, m := range entries {
		if !bytes.Equal(m.Data(), good) || !strings.HasPrefix(m.Headers().Get(subjects.HdrError), "bad_message_id: ") {
			t.Errorf("DEAD keeps %q because of %q", m.Data(), m.Headers().Get(subjects.HdrError))
		}
	}
	if len(entries) != len(names) {
		t.Errorf("%d entries in DEAD, want %d", len(entries), len(names))
	}
}

// scenario F14
func TestAModelThatNobodyServesAndARolloutLargerThanAnyEngineAreRejected(t *testing.T) {
	p := startWholePool(t)
	for id, body := range map[string]string{
		"model": `{"id":"model","job":"math","model":"nobody-serves-this","prompt":"x","sampling_params":{"max_tokens":4}}`,
		"large": `{"id":"large","job":"math","prompt":"x","sampling_params":{"max_tokens":100000000}}`,
	} {
		if err := p.submitRaw(p.Name.Submit(badJob, subjects.LaneNormal), badJob+"."+id, []byte(body)); err != nil {
			t.Fatal(err)
		}
		if r := p.result(id); r.Status != subjects.Rejected || r.Error == nil || r.Error.Class != subjects.ClassData {
			t.Errorf("%s: %s %+v", id, r.Status, r.Error)
		}
	}
	// An adapter may be loaded any time: who asks for one waits, until the deadline.
	lora := `{"id":"lora","job":"math","lora":"nobody-has-this","prompt":"x","deadline":"1s","sampling_params":{"max_tokens":4}}`
	if err := p.submitRaw(p.Name.Submit(badJob, subjects.LaneNormal), badJob+".lora", []byte(lora)); err != nil {
		t.Fatal(err)
	}
	if r := p.result("lora"); r.Status != subjects.Expired {
		t.Errorf("an adapter that nobody has: %s %+v", r.Status, r.Error)
	}
	// Unless the pool says that its engines have all there are.
	s, rev, err := p.Store.Settings(p.ctx())
	if err != nil {
		t.Fatal(err)
	}
	s.KnownLoRAs = true
	if _, err := p.Store.PutSettings(p.ctx(), s, rev); err != nil {
		t.Fatal(err)
	}
	again := `{"id":"lora2","job":"math","lora":"nobody-has-this","prompt":"x","sampling_params":{"max_tokens":4}}`
	if err := p.submitRaw(p.Name.Submit(badJob, subjects.LaneNormal), badJob+".lora2", []byte(again)); err != nil {
		t.Fatal(err)
	}
	if r := p.result("lora2"); r.Status != subjects.Rejected || r.Error == nil || r.Error.Code != "unknown_lora" {
		t.Errorf("an adapter that nobody has, where all are known: %s %+v", r.Status, r.Error)
	}
	p.goodOne("after")
	p.settled()
}

// scenario F14
func TestWhatTheServerCannotTakeIsAnErrorOfTheSubmit(t *testing.T) {
	p := startWholePool(t)
	huge := bytes.Repeat([]byte("x"), 9<<20)
	if err := p.submitRaw(p.Name.Submit(badJob, subjects.LaneNormal), badJob+".huge", huge); !errors.Is(err, nats.ErrMaxPayload) {
		t.Errorf("9 MiB: want %v, got %v", nats.ErrMaxPayload, err)
	}
	if err := p.submitRaw("rollout.nowhere.submit.math.normal", badJob+".0001", []byte("{}")); !errors.Is(err, jetstream.ErrNoStreamResponse) {
		t.Errorf("a pool that does not exist: want %v, got %v", jetstream.ErrNoStreamResponse, err)
	}
	c, err := client.Open(p.ctx(), p.nc, "default", badJob)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_, err = c.Submit(p.ctx(), &subjects.Request{ID: "huge", Prompt: string(huge), Sampling: subjects.SamplingParams{MaxTokens: 4}})
	if !errors.Is(err, subjects.ErrTooLarge) {
		t.Errorf("9 MiB through the library: want %v, got %v", subjects.ErrTooLarge, err)
	}
	p.goodOne("after")
	p.settled()
}

// Doors that only agents, dispatchers and operators use, with rubbish in them.
//
// scenario F14
func TestRubbishFromAgentsAndOperatorsStopsNobody(t *testing.T) {
	p := startWholePool(t)
	rubbish := [][]byte{nil, []byte("null"), []byte("{"), []byte(`{"engine":7}`), []byte(`{"engine":"e1","epoch":"x","seq":-1,"ranks":[{"running":-5,"kv_used_tokens":1e99}]}`),
		bytes.Repeat([]byte{0xff}, 1<<16), []byte(strings.Repeat("[", 50_000))}
	for _, b := range rubbish {
		for _, subject := range []string{p.Name.Load("e1"), p.Name.Load("nobody"), p.Name.Cache("e1"), p.Name.Cache("nobody"), p.Name.Ping(), p.Name.Snapshot("e1")} {
			if err := p.nc.Publish(subject, b); err != nil {
				t.Fatal(err)
			}
		}
		for _, key := range [][2]string{
			{p.Name.Bucket(subjects.Engines), "ghost"}, {p.Name.Bucket(subjects.Dispatchers), "ghost"}, {p.Name.Bucket(subjects.Cancels), "id.math.ghost"},
			{p.Name.Bucket(subjects.Cancels), "nonsense"}, {p.Name.Bucket(subjects.Reservations), "e1.math.ghost"}, {p.Name.Bucket(subjects.Reservations), "ghost.math.ghost2"},
			{subjects.BucketPools, "default"},
		} {
			if _, err := p.js.Publish(p.ctx(), subjects.BucketSubject(key[0], key[1]), b); err != nil {
				t.Fatalf("%s %s: %v", key[0], key[1], err)
			}
		}
	}
	p.goodOne("after")
	p.settled()
	if code, _, msg := call(t, p.NATS.URL(), "get", "engines", "-o", "json"); code != exitOK {
		t.Errorf("get engines: %s", msg)
	}
	for _, args := range [][]string{{"get", "rollouts"}, {"get", "jobs"}, {"get", "dispatchers"}, {"describe", "engine", "e1"}, {"dead", "list"}} {
		if code, _, msg := call(t, p.NATS.URL(), args...); code != exitOK {
			t.Errorf("%v: %s", args, msg)
		}
	}
}

// What a bad line of a file does at the command line's door is told in
// testdata/script/input.txtar; here it is every bad body at once.
//
// scenario F14
func TestNoBadBodyPassesTheCommandLine(t *testing.T) {
	for id, form := range badBodies {
		body := strings.ReplaceAll(form, "%s", id)
		switch id {
		case "nothing", "another-id", "another-job", "without-its-job":
			continue // there are no lines, or a line of that name is right
		}
		c := Submit{Job: badJob}
		if r, err := c.decode([]byte(body)); err == nil {
			t.Errorf("%s: %.200s passed as %+v", id, body, r)
		}
	}
}
