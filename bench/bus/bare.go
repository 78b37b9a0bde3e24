package bus

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"maps"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/rollbus/rollbus/dispatcher/policy"
	"github.com/rollbus/rollbus/kvstate"
	"github.com/rollbus/rollbus/subjects"
)

// resultBytes is what an answer of a few tokens encodes to.
const resultBytes = 512

// words are the headers of the chain's messages: those of the bus, with values
// that stand for any rollout's. They are made once.
type words struct{ submit, bind, result, release nats.Header }

func newWords() words {
	const prompt, output, left = 132, 4, 21_600_000
	epoch, none := "17-lntyoxkcaa", 0
	made, asked := output, prompt
	facts := subjects.Facts{
		Lane: subjects.LaneNormal, Reader: subjects.DefaultReader, PromptTokens: prompt, MaxTokens: 64,
		BlockTokens: 64, Namespace: 1<<63 - 1, Blocks: []uint64{1<<63 - 1, 1<<62 - 1},
	}
	held := subjects.Held{
		State: subjects.StateBound, Bind: 1, Epoch: epoch, LeftMS: left, Tokens: prompt + 64, PromptTokens: prompt, MaxTokens: 64,
		Lane: subjects.LaneNormal, Reader: subjects.DefaultReader, Dispatcher: "d1", Policy: policy.ProjectedTime,
		Reason: string(policy.ReasonLeastTime), Accepted: 1_795_984_580_645_841_562, PredictedCached: &none,
	}
	answer := subjects.Answer{
		Status: subjects.Completed, Bind: 1, Epoch: epoch, Engine: "e1", PromptTokens: &asked, CompletionTokens: &made, LeftMS: left,
	}
	released := subjects.Released{
		Outcome: subjects.OutcomeAnswered, Bind: 1, Epoch: epoch, Tokens: prompt + 64, PromptTokens: prompt,
		CompletionTokens: &made, Status: subjects.Completed,
	}
	return words{facts.Header(), held.Header(), answer.Header(), released.Header()}
}

// with is a message's own headers beside those of its kind.
func with(all nats.Header, own nats.Header) nats.Header {
	out := make(nats.Header, len(all)+len(own))
	maps.Copy(out, all)
	maps.Copy(out, own)
	return out
}

// bare is the chain without logic.
type bare struct {
	say words
	*side
	ctx     context.Context // ends with stop
	wg      sync.WaitGroup
	failed  atomic.Pointer[error]
	results []byte
	seen    []atomic.Uint64 // last sequence seen under an engine's keys
}

func engineName(i int) string { return "e" + strconv.Itoa(i) }

// engineOf is the inverse of engineName; -1 of another name.
func engineOf(name string) int {
	n, err := strconv.Atoi(strings.TrimPrefix(name, "e"))
	if err != nil {
		return -1
	}
	return n
}

func startBare(ctx context.Context, s *servers, c Case) (*side, error) {
	x, err := newSide(ctx, "bare", s, c)
	if err != nil {
		if x != nil {
			x.stop()
		}
		return nil, err
	}
	b := &bare{say: newWords(), side: x, results: bytes.Repeat([]byte("r"), resultBytes), seen: make([]atomic.Uint64, c.Engines)}
	life, end := context.WithCancel(ctx)
	b.ctx = life
	x.ends = append(x.ends, func() { end(); b.wg.Wait() })
	if err := b.start(ctx, c); err != nil {
		x.stop()
		return nil, err
	}
	return x, nil
}

func (b *bare) start(ctx context.Context, c Case) error {
	_, js, err := b.connect("trainer", 0)
	if err != nil {
		return err
	}
	body := bytes.Repeat([]byte("b"), c.Payload)
	b.submit = func(ctx context.Context, ids iter.Seq[string]) error { return b.send(ctx, js, ids, body) }
	for i := range c.Dispatchers {
		if err := b.dispatcher(ctx, c, i); err != nil {
			return fmt.Errorf("dispatcher %d: %w", i+1, err)
		}
	}
	for i := 0; i < c.Engines; i += enginesPerAgent {
		if err := b.agent(ctx, c, i, min(i+enginesPerAgent, c.Engines)); err != nil {
			return fmt.Errorf("agent of engine %d on: %w", i, err)
		}
	}
	return nil
}

func (b *bare) fail(err error) { b.failed.CompareAndSwap(nil, &err) }

func (b *bare) failure() error {
	if err := b.failed.Load(); err != nil {
		return *err
	}
	return nil
}

// send is the trainer: asynchronous publishes, their acks checked at the end.
func (b *bare) send(ctx context.Context, js jetstream.JetStream, ids iter.Seq[string], body []byte) error {
	subject := b.pool.Submit(job, subjects.LaneNormal)
	for id := range ids {
		m := &nats.Msg{Subject: subject, Data: body, Header: with(b.say.submit, nats.Header{subjects.HdrMsgID: {job + "." + id}})}
		// Waits for room like the client does.
		if _, err := js.PublishMsgAsync(m, jetstream.WithStallWait(drainWait)); err != nil {
			return fmt.Errorf("submit %s: %w", id, err)
		}
	}
	select {
	case <-js.PublishAsyncComplete():
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	return b.failure()
}

// dispatcher follows what a dispatcher follows, takes from the queue and binds:
// one bind in flight an engine. Every D-th engine is its own.
func (b *bare) dispatcher(ctx context.Context, c Case, nth int) error {
	nc, js, err := b.connect("dispatcher", nth)
	if err != nil {
		return err
	}
	bucket := b.pool.Bucket(subjects.Reservations)
	reservations := subjects.FollowerConsumer(fmt.Sprintf("f-bare%d-reservations", nth), subjects.BucketSubject(bucket, ">"), true)
	err = follow(ctx, nc, js, subjects.BucketStream(bucket), reservations, func(m *nats.Msg) {
		engine, _, _, _ := b.pool.ParseReservationSubject(m.Subject)
		if e := engineOf(engine); e >= 0 && e%c.Dispatchers == nth {
			if meta, err := m.Metadata(); err == nil {
				b.saw(e, meta.Sequence.Stream)
			}
		}
	})
	if err != nil {
		return err
	}
	results := subjects.FollowerConsumer(fmt.Sprintf("f-bare%d-results", nth), b.pool.ResultFilter("", ""), true)
	if err := follow(ctx, nc, js, b.pool.Results(), results, func(*nats.Msg) {}); err != nil {
		return err
	}
	queue, err := js.CreateOrUpdateConsumer(ctx, b.pool.Rollouts(), b.pool.RolloutsConsumer(job, subjects.LaneNormal))
	if err != nil {
		return err
	}
	work := make(chan jetstream.Msg)
	share := max(8, slots*c.Engines/c.Dispatchers)
	fetching, err := queue.Consume(func(m jetstream.Msg) {
		select {
		case work <- m:
		case <-b.ctx.Done():
		}
	}, jetstream.PullMaxMessages(share))
	if err != nil {
		return err
	}
	b.ends = append(b.ends, fetching.Stop)
	for e := nth; e < c.Engines; e += c.Dispatchers {
		b.wg.Go(func() {
			for {
				select {
				case m := <-work:
					b.bind(nc, e, m)
				case <-b.ctx.Done():
					return
				}
			}
		})
	}
	return nil
}

func (b *bare) saw(engine int, seq uint64) {
	for {
		old := b.seen[engine].Load()
		if old >= seq || b.seen[engine].CompareAndSwap(old, seq) {
			return
		}
	}
}

// bind writes the reservation under the engine's guard, again with the sequence
// that a refusal names, and acks.
func (b *bare) bind(nc *nats.Conn, engine int, m jetstream.Msg) {
	_, id, _ := strings.Cut(m.Headers().Get(subjects.HdrMsgID), ".")
	name := engineName(engine)
	expected := b.seen[engine].Load()
	for n := 1; ; n++ {
		seq, err := b.write(nc, b.pool.ReservationSubject(name, job, id), m.Data(), with(b.say.bind, nats.Header{
			subjects.HdrMsgID:          {job + "." + id + "#" + strconv.Itoa(n)},
			subjects.HdrExpectLastSeq:  {strconv.FormatUint(expected, 10)},
			subjects.HdrExpectLastSubj: {b.pool.EngineGuard(name)},
			subjects.HdrTTL:            {"108000"},
		}))
		moved, isMoved := errors.AsType[*kvstate.ConflictError](err)
		switch {
		case err == nil:
			b.saw(engine, seq)
			if err := m.Ack(); err != nil && b.ctx.Err() == nil {
				b.fail(fmt.Errorf("ack %s: %w", id, err))
			}
			return
		case isMoved:
			b.refused.Add(1)
			expected = moved.Actual
		case errors.Is(err, kvstate.ErrBusy): // another guarded write in flight: again
			b.refused.Add(1)
		default:
			if b.ctx.Err() == nil {
				b.fail(fmt.Errorf("bind %s: %w", id, err))
			}
			return
		}
	}
}

// agent follows the keys of its engines, answers each and deletes it.
func (b *bare) agent(ctx context.Context, c Case, from, to int) error {
	nc, js, err := b.connect("agent", 2+from/enginesPerAgent)
	if err != nil {
		return err
	}
	stream := subjects.BucketStream(b.pool.Bucket(subjects.Reservations))
	for e := from; e < to; e++ {
		name := engineName(e)
		err := follow(ctx, nc, js, stream, b.pool.AgentConsumer(name), func(m *nats.Msg) {
			if m.Header.Get(subjects.HdrKVOperation) != "" || b.ctx.Err() != nil {
				return
			}
			b.wg.Go(func() { b.answer(nc, m) })
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func (b *bare) answer(nc *nats.Conn, m *nats.Msg) {
	_, _, id, _ := b.pool.ParseReservationSubject(m.Subject)
	meta, err := m.Metadata()
	if err == nil {
		err = b.once(nc, b.pool.Result(job, subjects.DefaultReader, id), b.results, with(b.say.result, nats.Header{subjects.HdrExpectLastSeq: {"0"}}))
	}
	if err == nil {
		err = b.once(nc, m.Subject, nil, with(b.say.release, nats.Header{
			subjects.HdrExpectLastSeq: {strconv.FormatUint(meta.Sequence.Stream, 10)},
			subjects.HdrTTL:           {"60"},
		}))
	}
	if err != nil && b.ctx.Err() == nil {
		b.fail(fmt.Errorf("answer %s: %w", id, err))
	}
}

// once writes what only one may write, again while the server says that another
// guarded write is in flight (a cluster does so now and then).
func (b *bare) once(nc *nats.Conn, subject string, body []byte, h nats.Header) error {
	for n := 0; ; n++ {
		_, err := b.write(nc, subject, body, h)
		if !errors.Is(err, kvstate.ErrBusy) || n == 1000 {
			return err
		}
	}
}

// writeTimeout bounds one write.
const writeTimeout = 10 * time.Second

// write publishes and waits for the ack.
func (b *bare) write(nc *nats.Conn, subject string, body []byte, h nats.Header) (uint64, error) {
	reply, err := nc.RequestMsg(&nats.Msg{Subject: subject, Data: body, Header: h}, writeTimeout)
	if err != nil {
		return 0, err
	}
	var ack struct {
		Seq   uint64 `json:"seq"`
		Error *struct {
			Code        int    `json:"err_code"`
			Description string `json:"description"`
		} `json:"error"`
	}
	if err := json.Unmarshal(reply.Data, &ack); err != nil {
		return 0, err
	}
	if ack.Error == nil {
		return ack.Seq, nil
	}
	_, number, _ := strings.Cut(ack.Error.Description, ": ")
	if actual, err := strconv.ParseUint(number, 10, 64); err == nil && ack.Error.Code == 10071 {
		return 0, &kvstate.ConflictError{Actual: actual}
	}
	if ack.Error.Code == 10071 || ack.Error.Code == 10164 {
		return 0, kvstate.ErrBusy
	}
	return 0, fmt.Errorf("%s (%d)", ack.Error.Description, ack.Error.Code)
}
