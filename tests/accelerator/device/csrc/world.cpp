#include "world.h"

#include <Python.h>
#include <c10/util/Exception.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace sim {
namespace {
constexpr size_t kDeviceSpan = size_t(64) << 30, kPinnedSpan = size_t(64) << 30;
constexpr size_t kMostRaces = 1000;

struct Maps {  // device memory is closed to the host; pinned memory is mapped twice
  char *facade[kMostDevices] = {}, *alias[kMostDevices] = {}, *host = nullptr, *dma = nullptr;
  size_t device_top[kMostDevices] = {}, pinned_top = 0;  // addresses are handed out once
  std::map<uintptr_t, std::pair<size_t, char*>> registered;  // the host's own pages: bytes, second mapping
} maps;

const std::pair<const uintptr_t, std::pair<size_t, char*>>* registered_at(const void* address) {
  auto at = reinterpret_cast<uintptr_t>(address);
  auto it = maps.registered.upper_bound(at);
  if (it == maps.registered.begin()) return nullptr;
  --it;
  return at < it->first + it->second.first ? &*it : nullptr;
}

thread_local int t_device = 0;
thread_local int t_stream[kMostDevices] = {};
thread_local std::unique_ptr<Clock> t_clock;
thread_local int t_backwards = 0;  // that this thread runs now, one inside another
thread_local bool t_is_stream = false;
bool forked = false;
std::thread::id ender;

Clock& my_clock() { return t_clock && !t_backwards ? *t_clock : world().others_clock; }

char* map_or_raise(size_t bytes, int protection, int flags, int file) {
  void* at = mmap(nullptr, bytes, protection, flags | MAP_NORESERVE, file, 0);
  TORCH_CHECK(at != MAP_FAILED, "simulated device: no address space");
  return static_cast<char*>(at);
}

// The host touches pinned memory while a copy is in flight: no error on a real device, so here a
// sentence, and the memory is opened. Device memory is never the host's: that stays a fault.
struct sigaction before_us;
void on_fault(int number, siginfo_t* info, void* context) {
  void* address = info->si_addr;
  if (is_pinned(address)) {
    bool write = true;
#ifdef __x86_64__
    write = static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_ERR] & 2;
#endif
    Lock lock(world().mutex);
    auto at = reinterpret_cast<uintptr_t>(address);
    for (auto* region : world().closed) {
      if (at < region->begin || at >= region->begin + region->bytes) continue;
      for (auto& access : region->accesses)
        if (access.begin / kPage * kPage <= at && at < access.end + kPage &&
            access.clock > entry(world().known, access.stream)) {
          race(std::string("the host ") + (write ? "writes" : "reads") + " pinned memory that '" +
               access.what + "' on " + world().streams[access.stream]->name() + " may still " +
               (access.write ? "write" : "read"));
          break;
        }
      mprotect(reinterpret_cast<void*>(region->begin), region->bytes, PROT_READ | PROT_WRITE);
      return;
    }
    return;  // opened in the meantime
  }
  if (on_device(address)) {
    const char text[] = "simulated device: the host touched device memory\n";
    (void)!write(2, text, sizeof text - 1);
  }
  sigaction(number, &before_us, nullptr);  // the access is repeated, and fails for whoever was here
}

void watch_faults() {
  static bool watched = false;
  if (watched) return;
  watched = true;
  struct sigaction ours = {};
  ours.sa_sigaction = on_fault;
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &ours, &before_us);
}

void map_pinned() {
  int file = memfd_create("simulated-pinned", 0);
  TORCH_CHECK(file >= 0 && ftruncate(file, kPinnedSpan) == 0, "simulated device: no pinned memory");
  maps.host = map_or_raise(kPinnedSpan, PROT_READ | PROT_WRITE, MAP_SHARED, file);
  maps.dma = map_or_raise(kPinnedSpan, PROT_READ | PROT_WRITE, MAP_SHARED, file);
  close(file);
  watch_faults();
}

bool slow_now(Stream& s) {
  auto& d = s.delays;
  if (d.slow == "all") return true;
  if (d.slow == "main") return s.id == 0;
  if (d.slow == "side") return s.id != 0;
  return d.slow == "random" && s.dice() % 4 == 0;
}

void run(Stream* s) {
  t_is_stream = true;
  auto& w = world();
  while (true) {
    std::function<void()> task;
    {
      std::unique_lock<std::mutex> lock(s->mutex);
      s->changed.wait(lock, [&] { return w.ending || !s->queue.empty(); });
      if (w.ending) return;
      task = std::move(s->queue.front());
      s->queue.pop_front();
      s->busy = true;
      if (slow_now(*s))
        s->changed.wait_for(lock, std::chrono::microseconds(s->delays.microseconds),
                            [&] { return w.ending.load(); });
    }
    try {
      task();
    } catch (const std::exception& error) {
      Lock lock(w.mutex);
      if (w.error.empty()) w.error = error.what();
    }
    task = nullptr;
    std::lock_guard<std::mutex> lock(s->mutex);
    s->busy = false;
  }
}

void push(Stream& s, std::function<void()> task) {
  std::lock_guard<std::mutex> lock(s.mutex);
  s.queue.push_back(std::move(task));
  s.changed.notify_all();
}

// Pages are closed only where no other bytes of the allocation live, so that a host that works on
// the other half of a buffer is not disturbed.
void close_pages(const Region& r, const Access& a) {
  uintptr_t begin = a.begin <= r.begin ? r.begin : (a.begin + kPage - 1) / kPage * kPage;
  uintptr_t end = a.end >= r.begin + r.asked ? r.begin + r.bytes : a.end / kPage * kPage;
  end = (end + kPage - 1) / kPage * kPage;
  if (begin < end)
    mprotect(reinterpret_cast<void*>(begin), end - begin, a.write ? PROT_NONE : PROT_READ);
}

bool pending(const Access& a) { return a.clock > entry(world().known, a.stream); }

void host_learns(const Clock& clock) {
  auto& w = world();
  Lock lock(w.mutex);
  merge(my_clock(), clock);
  merge(w.known, clock);
  auto& closed = w.closed;
  for (size_t i = 0; i < closed.size();) {
    Region& r = *closed[i];
    bool any_over = false, any_pending = false;
    for (auto& a : r.accesses) (pending(a) ? any_pending : any_over) = true;
    if (any_over) open_pages(r);
    if (any_pending) i++;
    else closed.erase(closed.begin() + i);
  }
}

std::vector<std::pair<uintptr_t, uintptr_t>> unwritten(Region& r, uintptr_t begin, uintptr_t end) {
  std::vector<std::pair<uintptr_t, uintptr_t>> gaps;
  auto it = r.written.upper_bound(begin);
  if (it != r.written.begin() && std::prev(it)->second > begin) begin = std::prev(it)->second;
  for (; begin < end; ++it) {
    uintptr_t next = it == r.written.end() ? end : std::min(end, it->first);
    if (begin < next) gaps.push_back({begin, next});
    if (it == r.written.end()) break;
    begin = std::max(begin, it->second);
  }
  return gaps;
}

void mark_written(Region& r, uintptr_t begin, uintptr_t end) {
  auto it = r.written.upper_bound(begin);
  if (it != r.written.begin() && std::prev(it)->second >= begin) --it;
  while (it != r.written.end() && it->first <= end) {
    begin = std::min(begin, it->first);
    end = std::max(end, it->second);
    it = r.written.erase(it);
  }
  r.written[begin] = end;
}

Region* region_of(uintptr_t address) {
  auto& regions = world().regions;
  auto it = regions.upper_bound(address);
  if (it == regions.begin()) return nullptr;
  Region* r = std::prev(it)->second.get();
  return address < r->begin + r->bytes ? r : nullptr;
}

bool covers(const Use& u, const Access& a) { return u.begin <= a.begin && a.end <= u.end; }

void compare(Stream& s, const std::string& what, const Use& u, Region& r) {
  std::vector<Access> kept;
  for (auto& a : r.accesses) {
    bool overlap = a.begin < u.end && u.begin < a.end;
    bool ordered = a.stream == s.number || a.clock <= entry(s.clock, a.stream);
    if (overlap && !ordered && (a.write || u.writes))
      race("'" + what + "' on " + s.name() + (u.writes ? " writes" : " reads") + " what '" + a.what +
           "' on " + world().streams[a.stream]->name() + (a.write ? " writes" : " reads") +
           (r.device < 0 ? " (pinned memory)" : "") + ": nothing orders them");
    // What the new access is ordered after, and hides, need not be remembered.
    bool same_reader = !u.writes && !a.write && a.stream == s.number;
    if (!(covers(u, a) && (u.writes || same_reader))) kept.push_back(std::move(a));
  }
  r.accesses.swap(kept);
}
}  // namespace

World& world() {
  static World* the = new World();
  return *the;
}

void merge(Clock& into, const Clock& from) {
  if (into.size() < from.size()) into.resize(from.size());
  for (size_t i = 0; i < from.size(); i++) into[i] = std::max(into[i], from[i]);
}

void Moment::set() {
  std::lock_guard<std::mutex> lock(mutex_);
  over_ = true;
  when = std::chrono::steady_clock::now();
  changed_.notify_all();
}
void Moment::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  // Woken now and then, because when the process ends nobody sets what is still queued.
  while (!over_ && !world().ending) changed_.wait_for(lock, std::chrono::milliseconds(50));
}
bool Moment::over() {
  std::lock_guard<std::mutex> lock(mutex_);
  return over_ || world().ending;
}

std::string Stream::name() const {
  std::string text = id == 0 ? "the default stream" : "stream " + std::to_string(id);
  return device ? text + " of device " + std::to_string(device) : text;
}

void race(const std::string& sentence) {
  Lock lock(world().mutex);
  if (world().counters.races.size() < kMostRaces) world().counters.races.push_back(sentence);
}

// --- memory ------------------------------------------------------------------------------------
int device_of(const void* address) {
  auto* at = static_cast<const char*>(address);
  for (int d = 0; d < world().device_count; d++)
    if (maps.facade[d] && at >= maps.facade[d] && at < maps.facade[d] + kDeviceSpan) return d;
  return -1;
}
bool on_device(const void* address) { return device_of(address) >= 0; }
bool is_pinned(const void* address) {
  auto* at = static_cast<const char*>(address);
  if (maps.host && at >= maps.host && at < maps.host + kPinnedSpan) return true;
  return !maps.registered.empty() && registered_at(address);
}
void* alias(void* address) {
  int d = device_of(address);
  if (d >= 0) return maps.alias[d] + (static_cast<char*>(address) - maps.facade[d]);
  if (auto* found = maps.registered.empty() ? nullptr : registered_at(address))
    return found->second.second + (reinterpret_cast<uintptr_t>(address) - found->first);
  if (is_pinned(address)) return maps.dma + (static_cast<char*>(address) - maps.host);
  return address;
}
// As cudaHostRegister: pages that the host has already become pinned. They are mapped anew, twice.
bool register_pinned(uintptr_t begin, size_t asked) {
  if (begin % kPage || !asked) return false;
  Lock lock(world().mutex);
  size_t bytes = (asked + kPage - 1) / kPage * kPage;
  int file = memfd_create("simulated-registered", 0);
  TORCH_CHECK(file >= 0 && ftruncate(file, bytes) == 0, "simulated device: no pinned memory");
  auto* second = static_cast<char*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
  memcpy(second, reinterpret_cast<void*>(begin), bytes);
  void* again = mmap(reinterpret_cast<void*>(begin), bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0);
  close(file);
  TORCH_CHECK(again != MAP_FAILED, "simulated device: pages cannot be pinned");
  auto region = std::make_unique<Region>();
  region->begin = begin;
  region->bytes = bytes;
  region->asked = asked;
  region->device = -1;
  world().regions[begin] = std::move(region);
  maps.registered[begin] = {bytes, second};
  watch_faults();
  return true;
}
size_t unregister_pinned(uintptr_t begin) {  // whoever calls it has waited for what uses the pages
  Lock lock(world().mutex);
  auto it = maps.registered.find(begin);
  if (it == maps.registered.end()) return 0;
  auto [bytes, second] = it->second;
  std::erase(world().closed, world().regions.at(begin).get());
  world().regions.erase(begin);
  mprotect(reinterpret_cast<void*>(begin), bytes, PROT_READ | PROT_WRITE);
  munmap(second, bytes);
  maps.registered.erase(it);
  return bytes;
}
uintptr_t reserve_device(int device, size_t bytes) {
  if (!maps.facade[device]) {
    constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS;
    maps.facade[device] = map_or_raise(kDeviceSpan, PROT_NONE, flags, -1);
    maps.alias[device] = map_or_raise(kDeviceSpan, PROT_READ | PROT_WRITE, flags, -1);
  }
  TORCH_CHECK(maps.device_top[device] + bytes <= kDeviceSpan, "simulated device: addresses used up");
  auto at = reinterpret_cast<uintptr_t>(maps.facade[device]) + maps.device_top[device];
  maps.device_top[device] += bytes;
  return at;
}
uintptr_t reserve_pinned(size_t bytes) {
  if (!maps.host) map_pinned();
  TORCH_CHECK(maps.pinned_top + bytes <= kPinnedSpan, "simulated device: addresses used up");
  auto at = reinterpret_cast<uintptr_t>(maps.host) + maps.pinned_top;
  maps.pinned_top += bytes;
  return at;
}
void open_pages(Region& r) {  // all but what is still in flight
  mprotect(reinterpret_cast<void*>(r.begin), r.bytes, PROT_READ | PROT_WRITE);
  for (bool write : {false, true})  // where both are, the stricter is set last
    for (auto& a : r.accesses)
      if (a.write == write && pending(a)) close_pages(r, a);
}

// --- streams -----------------------------------------------------------------------------------
void check_started() {
  TORCH_CHECK(!forked, "Cannot re-initialize the simulated device in a forked subprocess: spawn it");
}
void after_fork() { forked = forked || !world().streams.empty(); }
bool in_forked_child() { return forked; }

Stream& stream(int device, int id) {
  check_started();
  auto& w = world();
  Lock lock(w.mutex);
  auto& found = w.by_id[{device, id}];
  if (found) return *found;
  auto made = std::make_unique<Stream>();
  made->number = static_cast<int>(w.streams.size());
  made->device = device;
  made->id = id;
  made->priority = id > kPoolStreams ? -1 : 0;
  made->delays = w.delays;
  made->dice.seed(w.delays.seed + made->number);
  found = made.get();
  w.streams.push_back(std::move(made));
  found->thread = std::thread(run, found);
  return *found;
}
void set_delays(const Delays& delays) {
  auto& w = world();
  Lock lock(w.mutex);
  w.delays = delays;
  for (auto& s : w.streams) {
    std::lock_guard<std::mutex> own(s->mutex);
    s->delays = delays;
    s->dice.seed(delays.seed + s->number);
  }
}
int next_pool_stream(int device, bool high_priority) {
  static int next[kMostDevices][2] = {};
  Lock lock(world().mutex);
  int turn = next[device][high_priority]++ % kPoolStreams;
  return 1 + turn + (high_priority ? kPoolStreams : 0);
}
int current_device() { return t_device; }
void set_current_device(int device) {
  TORCH_CHECK(device >= 0 && device < world().device_count, "simulated device: invalid device ordinal ",
              device, ", there are ", world().device_count);
  t_device = device;
}
int current_stream_id(int device) { return t_stream[device]; }
void set_current_stream(int device, int id) { t_stream[device] = id; }

// --- work --------------------------------------------------------------------------------------
void enqueue(Stream& s, const std::string& what, std::vector<Use> uses, std::function<void()> task) {
  rest_if_ending();
  auto& w = world();
  Lock lock(w.mutex);
  if (w.ending) return;
  merge(s.clock, my_clock());
  if (s.clock.size() <= size_t(s.number)) s.clock.resize(s.number + 1);
  uint64_t now = ++s.clock[s.number];
  if (!what.empty()) {
    w.counters.launches++;
    w.counters.launches_by_name[what]++;
  }
  std::vector<std::pair<uintptr_t, uintptr_t>> stale;
  for (auto& u : uses) {
    if (u.begin >= u.end) continue;
    Region* r = region_of(u.begin);
    TORCH_CHECK(r && u.end <= r->begin + r->bytes, "simulated device: illegal memory access by ", what);
    compare(s, what, u, *r);
    r->accesses.push_back({u.begin, u.end, u.writes, s.number, now, what});
    if (r->device < 0) {
      close_pages(*r, r->accesses.back());
      if (std::find(w.closed.begin(), w.closed.end(), r) == w.closed.end()) w.closed.push_back(r);
      continue;
    }
    // Memory that nobody has written since it was allocated reads as NaN.
    if (u.reads)
      for (auto& gap : unwritten(*r, u.begin, u.end)) stale.push_back(gap);
    mark_written(*r, u.begin, u.end);
  }
  if (stale.empty()) return push(s, std::move(task));
  push(s, [stale, task = std::move(task)] {
    for (auto& [begin, end] : stale) memset(alias(reinterpret_cast<void*>(begin)), 0xFF, end - begin);
    task();
  });
}
MomentPtr record(Stream& s) {
  auto moment = std::make_shared<Moment>();
  Lock lock(world().mutex);
  merge(s.clock, my_clock());
  moment->clock = s.clock;
  push(s, [moment] { moment->set(); });
  return moment;
}
void order(Stream& later, const MomentPtr& moment) {
  if (!moment) return;
  Lock lock(world().mutex);
  merge(later.clock, moment->clock);
  push(later, [moment] { moment->wait(); });
}
void host_wait(const std::string& kind, const MomentPtr& moment) {
  if (!moment) return;
  rest_if_ending();
  auto& w = world();
  if (!kind.empty()) {
    std::function<void(const std::string&)> tell;
    {
      Lock lock(w.mutex);
      w.counters.host_waits[kind]++;
      tell = w.on_wait;
    }
    if (tell) tell(kind);
  }
  if (PyGILState_Check()) {  // streams may want to run Python
    PyThreadState* python = PyEval_SaveThread();
    moment->wait();
    rest_if_ending();
    PyEval_RestoreThread(python);
  } else {
    moment->wait();
  }
  host_learns(moment->clock);
  std::string error;
  {
    Lock lock(w.mutex);
    error.swap(w.error);
  }
  TORCH_CHECK(error.empty(), "simulated device: asynchronous error: ", error);
}
bool query(const MomentPtr& moment) {
  rest_if_ending();
  if (!moment) return true;
  if (!moment->over()) return false;
  host_learns(moment->clock);
  return true;
}
bool idle(Stream& s) {
  Clock seen;
  {
    Lock lock(world().mutex);
    std::lock_guard<std::mutex> queue(s.mutex);
    if (s.busy || !s.queue.empty()) return false;
    seen = s.clock;
  }
  host_learns(seen);
  return true;
}

// --- threads of the host -----------------------------------------------------------------------
void begin_thread(const Clock& told) { t_clock = std::make_unique<Clock>(told); }
void begin_backward() {
  Lock lock(world().mutex);
  if (t_clock && !t_backwards++) merge(world().others_clock, *t_clock);
}
void end_backward() {
  Lock lock(world().mutex);
  if (t_clock && !--t_backwards) merge(*t_clock, world().others_clock);
}
Clock knowledge() {
  Lock lock(world().mutex);
  return my_clock();
}
void learn(const Clock& clock) {
  Lock lock(world().mutex);
  merge(my_clock(), clock);
}

// An interpreter that ends stops every thread that asks for its lock, and what stops a thread inside
// of C++ aborts the process. So threads that did not end before come to rest here.
void rest_if_ending() {
  if (!world().ending || t_is_stream || std::this_thread::get_id() == ender) return;
  if (PyGILState_GetThisThreadState() && PyGILState_Check()) PyEval_SaveThread();
  while (true) pause();
}

void end_world() {
  auto& w = world();
  if (forked) return;
  ender = std::this_thread::get_id();
  w.ending = true;
  std::vector<Stream*> all;
  {
    Lock lock(w.mutex);
    for (auto& s : w.streams) all.push_back(s.get());
  }
  for (auto* s : all) {
    std::lock_guard<std::mutex> lock(s->mutex);
    s->changed.notify_all();
  }
  if (!all.empty()) std::this_thread::sleep_for(std::chrono::milliseconds(50));  // let threads come to rest
  // A stream may sit in a collective whose peers have left: after a while it is left behind.
  auto patience = std::chrono::steady_clock::now() + std::chrono::seconds(2);
  for (auto* s : all) {
    while (true) {
      std::unique_lock<std::mutex> lock(s->mutex);
      if (!s->busy || std::chrono::steady_clock::now() > patience) break;
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    s->thread.detach();
  }
}
}  // namespace sim
