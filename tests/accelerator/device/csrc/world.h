// The simulated machine: streams that run, clocks that know what is ordered, memory that is watched.
//
// A stream is a host thread with a queue. Every piece of work says which bytes it reads and writes.
// When it is enqueued, vector clocks tell what it is ordered after, so a missing wait is found then,
// however the threads happen to run.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace sim {

constexpr int kMostDevices = 8;
constexpr int kPoolStreams = 32;  // of each priority and device, handed out in turn, as on CUDA
constexpr size_t kPage = 4096;

using Clock = std::vector<uint64_t>;  // for each stream, the last piece of work that is over
void merge(Clock& into, const Clock& from);
inline uint64_t entry(const Clock& clock, size_t stream) {
  return stream < clock.size() ? clock[stream] : 0;
}

// One recorded version of an event.
class Moment {
 public:
  Clock clock;
  void set();
  void wait();
  bool over();
  std::chrono::steady_clock::time_point when;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool over_ = false;
};
using MomentPtr = std::shared_ptr<Moment>;

struct Use {  // bytes that a piece of work touches
  uintptr_t begin, end;
  bool reads, writes;
};

struct Access {  // a use that the detector remembers
  uintptr_t begin, end;
  bool write;
  int stream;
  uint64_t clock;
  std::string what;
};

// A stretch of memory obtained at once: a segment of a device, or one pinned allocation.
struct Region {
  uintptr_t begin;
  size_t bytes;
  int device;       // -1: pinned
  size_t asked = 0;  // of a pinned allocation: what was asked for, the rest is padding
  std::vector<Access> accesses;
  std::map<uintptr_t, uintptr_t> written;  // since it was allocated: what a read may find
};

struct Delays {
  std::string slow = "none";  // none, main, side, all, random
  int microseconds = 0;
  unsigned seed = 0;
};

struct Stream {
  int number;  // in clocks and sentences
  int device, id, priority;
  Clock clock;        // guarded by the world's mutex
  std::mutex mutex;   // guards what follows; may be taken while the world's is held, not before it
  std::condition_variable changed;
  std::deque<std::function<void()>> queue;
  bool busy = false;
  Delays delays;
  std::mt19937 dice;
  std::thread thread;
  std::string name() const;
};

struct Counters {
  uint64_t launches = 0;
  std::map<std::string, uint64_t> launches_by_name;
  std::map<std::string, uint64_t> host_waits;   // as a real device would have them
  std::map<std::string, uint64_t> without_shape;  // waits only because torch knows no shape function
  std::vector<std::string> races;
};

struct World {
  std::recursive_mutex mutex;  // guards everything below; never held while waiting for Python
  int device_count = 1;
  std::vector<std::unique_ptr<Stream>> streams;
  std::map<std::pair<int, int>, Stream*> by_id;  // (device, id)
  std::map<uintptr_t, std::unique_ptr<Region>> regions;
  std::vector<Region*> closed;  // pinned, with pages closed to the host
  Clock known;                  // what any thread of the host knows
  Clock others_clock;           // what threads that nobody registered know, together
  Counters counters;
  Delays delays;                // of streams that are made from now on
  std::function<void(const std::string&)> on_wait;  // told of every wait that is counted
  std::string error;  // what a stream raised; shown at the next wait of the host
  std::atomic<bool> ending{false};
};
World& world();  // never destroyed: threads and tensors may outlive static destructors
using Lock = std::lock_guard<std::recursive_mutex>;

// Memory as streams see it.
bool on_device(const void* address);
bool is_pinned(const void* address);
int device_of(const void* address);
void* alias(void* address);  // where a stream finds these bytes
uintptr_t reserve_device(int device, size_t bytes);
uintptr_t reserve_pinned(size_t bytes);
void open_pages(Region& region);
bool register_pinned(uintptr_t begin, size_t bytes);
size_t unregister_pinned(uintptr_t begin);

// Streams.
void check_started();  // raises in a forked child
Stream& stream(int device, int id);
void set_delays(const Delays& delays);
int next_pool_stream(int device, bool high_priority);
int current_device();
void set_current_device(int device);
int current_stream_id(int device);
void set_current_stream(int device, int id);
inline Stream& current_stream(int device) { return stream(device, current_stream_id(device)); }

// Work. An empty name is not counted: it is no launch.
void enqueue(Stream& on, const std::string& what, std::vector<Use> uses, std::function<void()> task);
MomentPtr record(Stream& on);
void order(Stream& later, const MomentPtr& moment);  // the stream waits, not the host
void host_wait(const std::string& kind, const MomentPtr& moment);
bool query(const MomentPtr& moment);
bool idle(Stream& stream);
void race(const std::string& sentence);

// Threads of the host: each knows what it waited for, or was told. Those that are registered have a
// clock of their own. Threads of autograd are not; who runs a backward shares their clock in it.
void begin_thread(const Clock& told);
void begin_backward();
void end_backward();
Clock knowledge();
void learn(const Clock& clock);

void end_world();  // streams stop; what is queued is dropped, as when a process leaves a real device
void rest_if_ending();  // keeps threads that are still there then; called where no lock is held
void after_fork();
bool in_forked_child();  // of a process that used a device: nothing works, nothing may be locked
}  // namespace sim
