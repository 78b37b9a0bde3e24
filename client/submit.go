package client

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/rollbus/rollbus/kvstate"
	"github.com/rollbus/rollbus/subjects"
)

// publishTimeout bounds one exchange with NATS: 5 s.
const publishTimeout = 5 * time.Second

// attemptFor bounds one attempt to publish a body: 2 s and 1 s a MiB.
func attemptFor(body []byte) time.Duration {
	return 2*time.Second + time.Duration(len(body)>>20)*time.Second
}

// Handle names a submitted rollout.
type Handle struct {
	Job    string `json:"job"`
	ID     string `json:"id"`
	Reader string `json:"reader"`
	Seq    uint64 `json:"seq,omitempty"` // in ROLLOUTS
	// Duplicate tells that the id was submitted within the last two minutes:
	// the earlier request stands.
	Duplicate bool `json:"duplicate,omitempty"`
}

// Key is the rollout's name, <job>.<id>.
func (h Handle) Key() string { return subjects.RolloutKey(h.Job, h.ID) }

// Handle names a rollout submitted elsewhere, for Wait.
func (c *Client) Handle(id string) Handle { return Handle{Job: c.job, ID: id, Reader: c.opt.reader} }

// Submit stores one request and returns when NATS has it. A missing id is made
// up, missing job, reader and reply key are the client's; r itself is not
// changed. Bad requests come back as subjects.ErrInvalid with every problem
// named, nothing was sent then. A full pool is a *BackpressureError.
//
// While NATS does not answer, the identical request is sent again until the
// context or RetryFor ends: then ErrUnknown, and submitting the same id again
// is the way to find out.
func (c *Client) Submit(ctx context.Context, r *subjects.Request) (Handle, error) {
	e, err := c.prepare(r)
	if err != nil {
		return Handle{}, err
	}
	if err := c.ledger.add(e); err != nil {
		return e.handle, err
	}
	ack, err := c.publish(ctx, e)
	return c.acked(e, ack, err)
}

// prepare checks, completes and encodes a request.
func (c *Client) prepare(in *subjects.Request) (*entry, error) {
	if err := c.closed(); err != nil {
		return nil, err
	}
	if in == nil {
		return nil, fmt.Errorf("%w: the request is nil", subjects.ErrInvalid)
	}
	r := *in
	if r.SchemaVersion == 0 {
		r.SchemaVersion = subjects.SchemaVersion
	}
	if r.Job == "" {
		r.Job = c.job
	}
	if r.ID == "" {
		id, err := uuid.NewV7()
		if err != nil {
			return nil, fmt.Errorf("make an id: %w", err)
		}
		r.ID = id.String()
	}
	if r.Reader == "" {
		r.Reader = c.opt.reader
	}
	if r.ReplyKey == "" {
		r.ReplyKey = c.replyKey(r.ID)
	}
	var errs []error
	if r.Job != c.job {
		errs = append(errs, &subjects.FieldError{Field: "job", Problem: fmt.Sprintf("is %q and this client is of job %q: open one for that job", r.Job, c.job)})
	}
	if r.Reader != c.opt.reader {
		errs = append(errs, &subjects.FieldError{Field: "reader", Problem: fmt.Sprintf("is %q and this client reads as %q: open one with that Reader", r.Reader, c.opt.reader)})
	}
	if err := errors.Join(append(errs, r.Validate())...); err != nil {
		return nil, fmt.Errorf("submit rollout %.80q: %w", subjects.RolloutKey(r.Job, r.ID), err)
	}
	body, err := r.MarshalJSON()
	if err != nil {
		return nil, fmt.Errorf("submit rollout %s: %w", r.Key(), err)
	}
	facts := subjects.FactsFromRequest(&r, c.settings)
	header := facts.Header()
	header.Set(subjects.HdrMsgID, r.Key())
	most := min(int64(subjects.MaxRequestBytes), max(0, c.nc.MaxPayload()-headerBytes(header)))
	if c.nc.MaxPayload() == 0 { // not connected yet
		most = subjects.MaxRequestBytes
	}
	if int64(len(body)) > most {
		return nil, fmt.Errorf("submit rollout %s: %w: %d bytes, at most %d are taken (the wire's limit and the server's max_payload)", r.Key(), subjects.ErrTooLarge, len(body), most)
	}
	deadline := r.Deadline.D()
	if deadline == 0 {
		deadline = c.settings.Deadline.D()
	}
	return &entry{
		handle: Handle{Job: r.Job, ID: r.ID, Reader: r.Reader}, lane: r.Lane(), deadline: deadline,
		header: header, body: body, replyKey: r.ReplyKey,
	}, nil
}

func headerBytes(h nats.Header) int64 {
	n := int64(len("NATS/1.0\r\n\r\n"))
	for k, vs := range h {
		for _, v := range vs {
			n += int64(len(k) + len(v) + 4)
		}
	}
	return n
}

// message is made anew for each attempt: the library writes into it.
func (c *Client) message(e *entry) *nats.Msg {
	m := &nats.Msg{Subject: c.pool.Submit(c.job, e.lane), Header: make(nats.Header, len(e.header)), Data: e.body}
	maps.Copy(m.Header, e.header)
	return m
}

// publish sends until NATS answers.
func (c *Client) publish(ctx context.Context, e *entry) (*jetstream.PubAck, error) {
	ctx, cancel := context.WithTimeout(ctx, max(c.opt.retryFor, publishTimeout))
	defer cancel()
	pause := 50 * time.Millisecond
	for n := 1; ; n++ {
		if err := c.connected(ctx); err != nil {
			if n > 1 { // an earlier attempt was sent
				err = errors.Join(nats.ErrTimeout, err)
			}
			return nil, err
		}
		try, end := c.attempt(ctx, attemptFor(e.body))
		ack, err := c.js.PublishMsg(try, c.message(e), jetstream.WithRetryAttempts(0))
		if err != nil && errors.Is(context.Cause(try), errDisconnected) {
			err = errors.Join(nats.ErrTimeout, errDisconnected)
		}
		end()
		if err == nil || !unanswered(err) || c.opt.retryFor == 0 {
			return ack, err
		}
		if n == noStreamTries && errors.Is(err, jetstream.ErrNoStreamResponse) && c.noPool(ctx) {
			return nil, err
		}
		if wait := c.sleep(ctx, jitter(pause)); wait != nil {
			if errors.Is(err, wait) {
				return nil, err
			}
			return nil, errors.Join(err, wait)
		}
		pause = min(2*pause, 2*time.Second)
	}
}

// noPool tells that NATS knows no queue of this pool: waiting does not help.
func (c *Client) noPool(ctx context.Context) bool {
	ctx, done := c.attempt(ctx, kvstate.DefaultTimeout)
	defer done()
	_, err := c.js.Stream(ctx, c.pool.Rollouts())
	return errors.Is(err, jetstream.ErrStreamNotFound)
}

// acked turns what came of a publish into what Submit returns.
func (c *Client) acked(e *entry, ack *jetstream.PubAck, err error) (Handle, error) {
	if err != nil {
		// Nobody waits for an answer to what was not accepted.
		c.ledger.drop(e)
		return e.handle, c.explain(e, err)
	}
	c.full.reset()
	e.handle.Seq, e.handle.Duplicate = ack.Sequence, ack.Duplicate
	h := e.handle
	c.ledger.stored(e)
	if c.pings.due(e.lane) {
		// Dispatchers look for new queues each second; losing this costs that.
		_ = c.nc.Publish(c.pool.Ping(), nil)
	}
	return h, nil
}

// unanswered tells whether an error leaves open what happened.
func unanswered(err error) bool {
	if api, ok := errors.AsType[*jetstream.APIError](err); ok {
		return api.ErrorCode == 10158 || api.Code == 503 && !isFull(api)
	}
	for _, open := range [...]error{
		jetstream.ErrNoStreamResponse, nats.ErrNoResponders, nats.ErrTimeout, context.DeadlineExceeded,
		nats.ErrConnectionReconnecting, nats.ErrDisconnected, nats.ErrReconnectBufExceeded, jetstream.ErrAsyncPublishTimeout, jetstream.ErrJetStreamNotEnabled,
	} {
		if errors.Is(err, open) {
			return true
		}
	}
	return false
}

// isFull: the stream or its disk takes no more.
func isFull(api *jetstream.APIError) bool {
	switch api.ErrorCode {
	case 10167, 10047, 10023, 10002, 10028:
		return true
	case 10077:
		return strings.Contains(api.Description, "maximum") || strings.Contains(api.Description, "no space")
	}
	return false
}

func (c *Client) explain(e *entry, err error) error {
	wrap := func(kind error, more string) error {
		return fmt.Errorf("submit rollout %s: %w: %w%s", e.handle.Key(), kind, err, more)
	}
	api, isAPI := errors.AsType[*jetstream.APIError](err)
	switch {
	case errors.Is(err, ErrClosed):
		return wrap(ErrUnknown, "")
	case isAPI && isFull(api):
		return fmt.Errorf("submit rollout %s: %w", e.handle.Key(), &BackpressureError{RetryAfter: c.full.next(), Cause: api.Description})
	case errors.Is(err, nats.ErrMaxPayload):
		return wrap(subjects.ErrTooLarge, "")
	case errors.Is(err, jetstream.ErrNoStreamResponse), errors.Is(err, nats.ErrNoResponders):
		// The server itself said that nobody is there: no pool, or no JetStream
		// for now, as with a full disk (scenario B9).
		if !c.noPool(c.ctx) {
			return wrap(ErrUnavailable, fmt.Sprintf(" (no stream takes %s now: JetStream is off or has no leader; look at the servers' disks)", c.pool.Submit(c.job, e.lane)))
		}
		return wrap(ErrNoPool, fmt.Sprintf(" (no stream takes %s: is the pool's name right, and was it made? `rollbus pool init`)", c.pool.Submit(c.job, e.lane)))
	case errors.Is(err, nats.ErrReconnectBufExceeded), errors.Is(err, nats.ErrConnectionClosed),
		errors.Is(err, errNotSent) && !errors.Is(err, nats.ErrTimeout):
		return wrap(ErrUnavailable, "")
	case unanswered(err), errors.Is(err, context.Canceled):
		return wrap(ErrUnknown, " (NATS acknowledged nothing: its disk may be full, its JetStream without a leader, or the credential may not submit for this job)")
	}
	return wrap(errRefused, "")
}

var errRefused = errors.New("refused by NATS")

// jitter spreads a pause over half to the whole of it.
func jitter(d time.Duration) time.Duration { return d/2 + rand.N(d/2+1) }

// backoff is how long to stay away from a full pool: 250 ms, doubled with each
// refusal up to 30 s, reset by the first success.
type backoff struct {
	mu sync.Mutex
	d  time.Duration
}

func (b *backoff) next() time.Duration {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.d = min(max(2*b.d, 250*time.Millisecond), 30*time.Second)
	return jitter(b.d).Round(time.Millisecond)
}

func (b *backoff) reset() {
	b.mu.Lock()
	b.d = 0
	b.mu.Unlock()
}

// pings says when dispatchers may not know a queue: at the first submission to
// a lane, and when its consumers may have gone meanwhile.
type pings struct {
	mu   sync.Mutex
	last map[subjects.Lane]time.Time
}

const pingEvery = 10 * time.Minute

func (p *pings) due(l subjects.Lane) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.last == nil {
		p.last = make(map[subjects.Lane]time.Time, len(subjects.Lanes))
	}
	at, known := p.last[l]
	if known && time.Since(at) < pingEvery {
		return false
	}
	p.last[l] = time.Now()
	return true
}
