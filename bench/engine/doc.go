// Package engine is a simulated inference server: real HTTP on its own
// listener, the request and metric formats of vLLM, and behind them the model
// of package model instead of weights. It says so: the Server header, /version
// and /server_info name it as simulated.
//
// Output is a function of the tokens before it, the namespace (model, LoRA,
// salt) and the sampling seed, and of nothing else: another engine, attempt or
// speed gives the same tokens, and a rollout resumed from its partial output
// goes on as it would have. What it does not do: n > 1, several prompts in one
// request, beam search, temperature.
//
// Where an output ends: at max_tokens (length); before it (stop) at a stop
// string or stop token, where sim_output_tokens (tokens of output) or
// sim_total_tokens (prompt and output together, which a resumed request keeps)
// say, or, when neither is given and EOS is not ignored, with a chance of
// 1/MeanOutput at every token. Text is read as tokens by the rule of Tokenize.
//
// Ordering: one goroutine (the driver) owns the engine model; handlers send it
// commands and read progress. Back-pressure: the queue takes MaxQueued waiting
// requests and answers 503 above. Failure: faults are armed by configuration,
// POST /sim/fault {"kind": ..., "count": ..., "after_tokens": ...} or
// Server.Arm, and strike requests in order of arrival; Die
// and Restart end a life of the server as a killed process would, cache and
// counters lost.
//
// Speed: TimeScale divides every modelled time. Streams are flushed in rounds,
// so that 1,000 streams cost some thousand writes a second and not one wake-up
// a token; the first token is sent at once.
package engine
