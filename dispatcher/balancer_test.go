package dispatcher

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/rollbus/rollbus/kvstate/natstest"
)

// call asks the balancer interface of a dispatcher.
func call(t *testing.T, d *Dispatcher, method, name, body string) (int, map[string]any) {
	t.Helper()
	w := httptest.NewRecorder()
	d.Handler().ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), method, "/balancer/"+name, bytes.NewReader([]byte(body))))
	var out map[string]any
	if err := json.Unmarshal(w.Body.Bytes(), &out); err != nil {
		t.Fatalf("%s answers %q: %v", name, w.Body.String(), err)
	}
	return w.Code, out
}

func text(t *testing.T, v any) string {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// S5's interface over two dispatchers: what one grants, the other renews and
// releases; servers added at one are placed on by both.
func TestTheBalancerInterfaceIsOneAcrossDispatchers(t *testing.T) {
	b := newBench(t)
	one, two := b.real(), b.real()
	if code, out := call(t, one, "POST", "add_servers", `{"servers":[{"name":"s1","slots":2},{"name":"s2","slots":2}]}`); code != http.StatusOK {
		t.Fatalf("add_servers: %d %v", code, out)
	}
	for _, d := range []*Dispatcher{one, two} {
		b.ready(d)
		natstest.Eventually(t, within, "both servers at both dispatchers", func() bool {
			_, out := call(t, d, "GET", "get_status", "")
			return out["slots"] == 4.0
		})
	}
	at := map[string]int{}
	var held []any
	for i, id := range []string{"r1", "r2", "r3", "r4"} {
		code, out := call(t, []*Dispatcher{one, two}[i%2], "POST", "acquire_server", `{"request_id":"`+id+`","prompt_ids":[1,2,3],"max_tokens":5}`)
		if code != http.StatusOK {
			t.Fatalf("acquire %s: %d %v", id, code, out)
		}
		at[out["server"].(string)]++
		held = append(held, out["reservation"])
	}
	if at["s1"] != 2 || at["s2"] != 2 {
		t.Errorf("four requests went to %v: want two to each", at)
	}
	for _, d := range []*Dispatcher{one, two} {
		natstest.Eventually(t, within, "both servers listed as full", func() bool {
			_, out := call(t, d, "GET", "get_all_servers", "")
			full := 0
			servers, _ := out["servers"].([]any)
			for _, s := range servers {
				if s, _ := s.(map[string]any); s["external"] == true && s["state"] == "ready" && s["slots"] == 2.0 && s["reserved"] == 2.0 && s["reserved_tokens"] == 16.0 {
					full++
				}
			}
			return full == 2 && len(servers) == 2
		})
	}
	if code, out := call(t, two, "POST", "acquire_server", `{"request_id":"r1","prompt_ids":[1]}`); code != http.StatusConflict {
		t.Errorf("acquired a second time: %d %v", code, out)
	}
	code, out := call(t, two, "POST", "renew", `{"reservation":`+text(t, held[0])+`,"ttl":"30s"}`)
	if code != http.StatusOK {
		t.Fatalf("renew at the other dispatcher: %d %v", code, out)
	}
	if code, _ := call(t, one, "POST", "release_server", `{"reservation":`+text(t, held[0])+`}`); code != http.StatusNotFound {
		t.Errorf("released at a revision that was renewed: %d", code)
	}
	held[0] = out["reservation"]
	for _, h := range held {
		if code, out := call(t, one, "POST", "release_server", `{"reservation":`+text(t, h)+`,"completion_tokens":5}`); code != http.StatusOK {
			t.Errorf("release: %d %v", code, out)
		}
	}
	for _, d := range []*Dispatcher{one, two} {
		natstest.Eventually(t, within, "nothing reserved", func() bool {
			_, out := call(t, d, "GET", "get_status", "")
			return out["reserved"] == 0.0
		})
	}
	if code, out := call(t, two, "POST", "remove_servers", `{"servers":["s1","s2"]}`); code != http.StatusOK {
		t.Fatalf("remove_servers: %d %v", code, out)
	}
	again := 4
	natstest.Eventually(t, within, "no server takes a request", func() bool {
		again++ // one that was still taken stands, and is refused a second time
		code, _ := call(t, one, "POST", "acquire_server", fmt.Sprintf(`{"request_id":"r%d","prompt_ids":[1]}`, again))
		return code == http.StatusServiceUnavailable
	})
}

func TestTheBalancerInterfaceNamesWhatIsWrong(t *testing.T) {
	b := newBench(t)
	d := b.real()
	for name, body := range map[string]string{
		"acquire_server": `{"request_id":"R 1","prompt_ids":[1]}`, "release_server": `{"reservation":{}}`,
		"add_servers": `{"servers":[{"name":"s","slots":0}]}`, "renew": `{`,
	} {
		code, out := call(t, d, "POST", name, body)
		e, _ := out["error"].(map[string]any)
		if code != http.StatusBadRequest || e["message"] == "" || e["code"] != "invalid_request" {
			t.Errorf("%s with %s: %d %v", name, body, code, out)
		}
	}
	if code, _ := call(t, d, "POST", "acquire_server", `{"request_id":"r","prompt_ids":[1],"unknown":1}`); code != http.StatusBadRequest {
		t.Errorf("an unknown field is taken: %d", code)
	}
}
