package subjects

import (
	"slices"
	"time"
)

// Permissions are what one credential may publish and subscribe to, as NATS
// spells them. Nothing else is allowed.
type Permissions struct {
	Publish   []string `json:"publish"`
	Subscribe []string `json:"subscribe"`
	// Responses: it may answer what it was asked, at the asker's inbox.
	Responses bool `json:"responses,omitempty"`
}

// InboxPrefix is where a credential of that name hears answers. A connection has
// to be opened with it (nats.CustomInboxPrefix): the common inbox of NATS would
// let everybody read everybody's answers.
func InboxPrefix(name string) string { return "_INBOX_" + name }

// Bounds of Permissions.Responses: to one question, and how long after it.
const (
	MaxResponses = 10_000
	ResponseTime = time.Minute
)

const jsAPI = "$JS.API."

// AgentPermissions are those of an agent that serves these engines, at least
// one; its inbox bears the first one's name. It writes and reads its engines'
// own keys, takes exactly the consumers a-<engine> and a-<pool>+<engine>, whose
// filters NATS enforces, and stands for results in the whole pool: of those it
// may write the first answer and read the register, nobody's request.
func (p Pool) AgentPermissions(engines ...string) Permissions {
	if len(engines) == 0 {
		return Permissions{}
	}
	res, eng := p.Bucket(Reservations), p.Bucket(Engines)
	can, par := p.Bucket(Cancels), p.Bucket(Partials)
	pub := []string{
		p.ResultFilter("", ""), p.Tokens("*", "*"),
		jsAPI + "STREAM.MSG.GET." + p.Results(),
		jsAPI + "STREAM.INFO." + BucketStream(par),
	}
	for _, b := range []string{eng, can, BucketPools} {
		pub = append(pub, jsAPI+"STREAM.INFO."+BucketStream(b))
	}
	sub := []string{InboxPrefix(engines[0]) + ".>"}
	for _, e := range engines {
		pub = append(pub, p.EngineGuard(e), BucketSubject(eng, e), BucketSubject(par, e+".>"), p.Load(e), p.Cache(e),
			jsAPI+"DIRECT.GET."+BucketStream(par)+"."+BucketSubject(par, e+".>"))
		pub = append(pub, oneConsumer(BucketStream(res), ConsumerAgent(e), p.EngineGuard(e))...)
		shared := p.ConsumerAgentFollower(e)
		pub = append(pub, oneConsumer(BucketStream(eng), shared, BucketSubject(eng, e))...)
		pub = append(pub, oneConsumer(BucketStream(can), shared, BucketSubject(can, ">"))...)
		pub = append(pub, oneConsumer(BucketStream(BucketPools), shared, BucketSubject(BucketPools, p.name))...)
		sub = append(sub, p.Snapshot(e))
	}
	return Permissions{Publish: pub, Subscribe: sub, Responses: true}
}

// oneConsumer lets a credential make, ask and delete the consumer of that name
// with that filter. Never a wildcard for the name: it would let one take
// another's.
func oneConsumer(stream, name, filter string) []string {
	api := jsAPI + "CONSUMER."
	return []string{
		api + "CREATE." + stream + "." + name + "." + filter,
		api + "DELETE." + stream + "." + name,
		api + "INFO." + stream + "." + name,
		api + "MSG.NEXT." + stream + "." + name,
	}
}

// DispatcherPermissions are those of the dispatcher of that name. It serves the
// whole pool and makes its streams where they are missing; it cannot delete,
// purge or change one, nor write settings, cancels, or another's registration.
func (p Pool) DispatcherPermissions(name string) Permissions {
	pub := []string{
		p.RetrySubject("*"), p.ResultFilter("", ""), p.DeadSubject("*"), p.Decision(), p.JournalSubject(name), p.Snapshot("*"),
		BucketSubject(p.Bucket(Reservations), ">"), BucketSubject(p.Bucket(Owners), ">"), BucketSubject(p.Bucket(Dispatchers), name),
	}
	for _, s := range p.Streams(Layout{Record: true}) {
		pub = append(pub, jsAPI+"STREAM.INFO."+s.Name, jsAPI+"STREAM.CREATE."+s.Name)
	}
	read := []string{p.Rollouts(), p.Retry(), p.Results()}
	for _, b := range []string{Reservations, Engines, Dispatchers, Owners, Cancels} {
		read = append(read, BucketStream(p.Bucket(b)))
	}
	for _, s := range append(read, BucketStream(BucketPools)) {
		pub = append(pub, jsAPI+"STREAM.MSG.GET."+s, jsAPI+"DIRECT.GET."+s, jsAPI+"DIRECT.GET."+s+".>",
			jsAPI+"CONSUMER.CREATE."+s+".>", jsAPI+"CONSUMER.DELETE."+s+".*", jsAPI+"CONSUMER.INFO."+s+".*",
			jsAPI+"CONSUMER.MSG.NEXT."+s+".*", jsAPI+"CONSUMER.LEADER.STEPDOWN."+s+".*")
	}
	pub = append(pub, jsAPI+"STREAM.MSG.GET."+BucketStream(p.Bucket(Partials)))
	for _, s := range []string{p.Rollouts(), p.Retry()} {
		pub = append(pub, "$JS.ACK."+s+".>")
	}
	return Permissions{
		Publish:   pub,
		Subscribe: []string{InboxPrefix(name) + ".>", p.Ping(), p.Load("*"), p.Cache("*")},
	}
}

// TrainerPermissions are those of one reader of one job: submit, cancel, read
// and receive its answers. Its inbox bears the job's name. Nothing of the queue:
// the client's last ledger then looks at the register alone.
func (p Pool) TrainerPermissions(job, reader string) Permissions {
	can, results := p.Bucket(Cancels), p.Results()
	pub := []string{
		p.Submit(job, "*"), p.Ping(), p.Result(job, reader, "*"),
		BucketSubject(can, "*."+job), BucketSubject(can, "*."+job+".>"),
		"$JS.ACK." + results + "." + ConsumerTrainer(job, reader) + ".>",
		jsAPI + "DIRECT.GET." + results + "." + p.Result(job, reader, "*"),
		jsAPI + "DIRECT.GET." + BucketStream(BucketPools) + "." + BucketSubject(BucketPools, p.name),
	}
	own := oneConsumer(results, ConsumerTrainer(job, reader), p.ResultFilter(job, reader))
	// Its durable keeps what was not received: deleting it is for nobody.
	own = slices.DeleteFunc(own, func(s string) bool { return s == jsAPI+"CONSUMER.DELETE."+results+"."+ConsumerTrainer(job, reader) })
	return Permissions{Publish: append(pub, own...), Subscribe: []string{InboxPrefix(job) + ".>", p.Tokens(job, "*")}}
}
