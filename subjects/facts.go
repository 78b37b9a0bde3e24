package subjects

// Facts are what placement needs to know of a request, decoded from headers or
// body. They are plain data: the decision core, the journal and replay see
// these and never a body.
type Facts struct {
	Job    string `json:"job"`
	ID     string `json:"id"`
	Reader string `json:"reader,omitempty"`
	Lane   Lane   `json:"lane"`
	Model  string `json:"model,omitempty"`
	LoRA   string `json:"lora,omitempty"`

	PromptTokens   int      `json:"prompt_tokens"`             // with the tokens resumed from; exact, or characters / 4
	MaxTokens      int      `json:"max_tokens"`                // of the output still to make
	ExpectedTokens int      `json:"expected_tokens,omitempty"` // the caller's guess; 0 = none
	Namespace      uint64   `json:"namespace,omitempty"`
	BlockTokens    int      `json:"block_tokens,omitempty"` // tokens a block of Blocks; not the pool's = the hashes are of no use
	Blocks         []uint64 `json:"blocks,omitempty"`       // chained block hashes of the prompt, at most MaxHeaderBlocks

	Affinity   string `json:"affinity,omitempty"`
	Group      string `json:"group,omitempty"`
	Trajectory string `json:"trajectory,omitempty"`
	Turn       int    `json:"turn,omitempty"`
	Step       int64  `json:"step,omitempty"`

	WeightMin   *int64 `json:"weight_min,omitempty"`
	WeightExact *int64 `json:"weight_exact,omitempty"`
	// WeightStaleness is max_staleness: how many versions below the newest may answer.
	WeightStaleness *int64 `json:"weight_staleness,omitempty"`
	Rank            *int   `json:"rank,omitempty"`

	DeadlineMS       int64 `json:"deadline_ms,omitempty"`        // from acceptance; 0 = the pool's
	AttemptTimeoutMS int64 `json:"attempt_timeout_ms,omitempty"` // 0 = the pool's
	MaxAttempts      int   `json:"max_attempts,omitempty"`       // 0 = the pool's

	// Of a requeued request; zero for a fresh one.
	Bind   int      `json:"bind,omitempty"`    // the next bind's number is at least this; 0 = 1
	Burnt  int      `json:"burnt,omitempty"`   // attempts that counted
	Tried  []string `json:"tried,omitempty"`   // engines
	LeftMS int64    `json:"left_ms,omitempty"` // to the deadline when the message was stored
	// Accepted is the server's stamp of the first acceptance, unix ns; 0 = this message is it.
	Accepted int64 `json:"accepted,omitempty"`
}

// Requeued returns the facts with what a requeue adds taken from the headers
// of its message in RETRY: FactsFromRequest knows the body only.
func (f Facts) Requeued(from Facts) Facts {
	f.Lane = from.Lane
	f.Bind, f.Burnt, f.Tried, f.LeftMS, f.Accepted = from.Bind, from.Burnt, from.Tried, from.LeftMS, from.Accepted
	return f
}

// Key is the rollout's name, <job>.<id>.
func (f *Facts) Key() string { return RolloutKey(f.Job, f.ID) }

// Held are the accounting facts of one reservation, from its headers.
type Held struct {
	Engine string `json:"engine"`
	Job    string `json:"job"`
	ID     string `json:"id"`
	State  State  `json:"state"`

	Bind   int    `json:"bind"`
	Burnt  int    `json:"burnt,omitempty"`
	Epoch  string `json:"epoch,omitempty"`
	LeftMS int64  `json:"left_ms"` // to the deadline when stored

	Tokens           int      `json:"tokens"` // reserved: prompt + expected output
	PromptTokens     int      `json:"prompt_tokens"`
	MaxTokens        int      `json:"max_tokens,omitempty"`
	Lane             Lane     `json:"lane,omitempty"`
	Reader           string   `json:"reader,omitempty"`
	Group            string   `json:"group,omitempty"`
	Trajectory       string   `json:"trajectory,omitempty"`
	Turn             int      `json:"turn,omitempty"`
	Affinity         string   `json:"affinity,omitempty"`
	Tried            []string `json:"tried,omitempty"`
	Dispatcher       string   `json:"dispatcher,omitempty"`
	Policy           string   `json:"policy,omitempty"`
	Reason           string   `json:"reason,omitempty"`
	ReturnReason     string   `json:"return_reason,omitempty"`
	Accepted         int64    `json:"accepted,omitempty"` // server time, unix ns
	MaxAttempts      int      `json:"max_attempts,omitempty"`
	AttemptTimeoutMS int64    `json:"attempt_timeout_ms,omitempty"`
	Weights          string   `json:"weights,omitempty"`
	Rank             *int     `json:"rank,omitempty"`
	PredictedCached  *int     `json:"predicted_cached,omitempty"` // tokens

	// Of owner_pressure: the beginning of its prompt, and the engine's weights then.
	OwnerKey      string `json:"owner_key,omitempty"`
	Anchor        uint64 `json:"anchor,string,omitempty"`
	WeightVersion *int64 `json:"weight_version,omitempty"`
}

// Key is the rollout's name, <job>.<id>.
func (h *Held) Key() string { return RolloutKey(h.Job, h.ID) }

// Outcome of a release: how a reservation ended.
type Outcome string

// Outcomes.
const (
	OutcomeAnswered   Outcome = "answered"   // this run's result was stored
	OutcomeSuperseded Outcome = "superseded" // another answer was there first
	OutcomeRequeued   Outcome = "requeued"   // it stands in RETRY
	OutcomeExpired    Outcome = "expired"
	OutcomeFailed     Outcome = "failed" // max_attempts
	OutcomeCancelled  Outcome = "cancelled"
)

// Released are the facts of a delete marker of a reservation.
type Released struct {
	Engine           string  `json:"engine"`
	Job              string  `json:"job"`
	ID               string  `json:"id"`
	Outcome          Outcome `json:"outcome,omitempty"`
	Bind             int     `json:"bind,omitempty"`
	Epoch            string  `json:"epoch,omitempty"`
	Tokens           int     `json:"tokens,omitempty"`
	PromptTokens     int     `json:"prompt_tokens,omitempty"`
	CompletionTokens *int    `json:"completion_tokens,omitempty"`
	CachedTokens     *int    `json:"cached_tokens,omitempty"`
	Group            string  `json:"group,omitempty"`
	Status           Status  `json:"status,omitempty"` // of the answer that this run stored; empty = not told
}

// Answer are the facts of a result, from its headers.
type Answer struct {
	Job              string `json:"job"`
	ID               string `json:"id"`
	Reader           string `json:"reader,omitempty"`
	Status           Status `json:"status,omitempty"` // empty = received: the answer was read
	Bind             int    `json:"bind,omitempty"`
	Epoch            string `json:"epoch,omitempty"`
	Engine           string `json:"engine,omitempty"`
	PromptTokens     *int   `json:"prompt_tokens,omitempty"`
	CompletionTokens *int   `json:"completion_tokens,omitempty"`
	CachedTokens     *int   `json:"cached_tokens,omitempty"`
	Group            string `json:"group,omitempty"`
	LeftMS           int64  `json:"left_ms,omitempty"`
}

// Key is the rollout's name, <job>.<id>.
func (a *Answer) Key() string { return RolloutKey(a.Job, a.ID) }
