// Package client submits rollouts and reads their answers: what a trainer
// needs of rollbus, and all of it.
//
//	c, err := client.Open(ctx, nc, "qwen3", "math-7b")
//	h, err := c.Submit(ctx, &subjects.Request{ID: "step12-0001", PromptTokenIDs: ids, ...})
//	for res, err := range c.Results(ctx) { ... }
//
// Ordering: requests of one lane are taken in the order in which they were
// stored; answers come in the order in which they were given.
//
// Safe repeats: a rollout is named by its job and id, and the first terminal
// answer stands. Submitting the same id again, from this process or after a
// crash, never makes a second answer. Submit repeats by itself what NATS did
// not acknowledge.
//
// At least once, then never: an answer is *received* when Done is called for
// it, or when a Results loop asks for the next one. Before that it comes again
// after a crash; after that nobody is handed it again. Wait hands an answer out
// without receiving it: call Done once it is kept. Do is for callers who keep
// nothing: it receives at once.
//
// Back-pressure: a full pool is a *BackpressureError with the time to wait.
// SubmitMany keeps at most MaxInFlight requests unacknowledged. Everything the
// client keeps is bounded: see the options.
//
// The last ledger: what was submitted is kept until it is answered. Two minutes
// after a deadline that passed without an answer (a dispatcher says expired
// long before) the client looks for the rollout in the queue, among the
// reservations and in the register. When it is nowhere it is submitted once
// more, and if that is lost too, a *LostError says so.
//
// A random reply key in each request, echoed in its answer, shows an answer that
// was written by somebody who never saw the request: *ReplyKeyError.
//
// One process of a job reads under one reader name (default "main"); two
// processes of one name share the answers between them.
//
// A credential for job j, reader r of pool p needs to publish
//
//	rollout.p.submit.j.*  rollout.p.ping  rollout.p.result.j.r.*
//	$KV.rollbus_p_cancels.*.j  $KV.rollbus_p_cancels.*.j.>
//	$JS.API.CONSUMER.CREATE.RESULTS_p.t-j-r.rollout.p.result.j.r.>
//	$JS.API.CONSUMER.INFO.RESULTS_p.t-j-r  $JS.API.CONSUMER.MSG.NEXT.RESULTS_p.t-j-r
//	$JS.ACK.RESULTS_p.t-j-r.>
//	$JS.API.DIRECT.GET.RESULTS_p.rollout.p.result.j.r.*
//	$JS.API.DIRECT.GET.KV_rollbus_pools.$KV.rollbus_pools.p
//
// and to subscribe to its inbox and rollout.p.tokens.j.*. With these alone the
// last ledger sees the register only: what has no answer at its deadline and
// three minutes is submitted once more without a look at the queue.
//
// To test against it: start an embedded nats-server with JetStream, call
// subjects.Ensure, and answer by hand as the Examples do.
package client
