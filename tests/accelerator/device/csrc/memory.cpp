#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <set>

namespace sim {
namespace {
using c10::CachingDeviceAllocator::DeviceStats;

// CUDA's numbers: what is rounded to what, and what is cut from larger segments.
constexpr size_t kRound = 512, kSmall = size_t(1) << 20, kSmallSegment = size_t(2) << 20;
constexpr size_t kLargeSegment = size_t(20) << 20, kOwnSegment = size_t(10) << 20;
constexpr size_t kSegmentRound = size_t(2) << 20;

size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

// A piece of a segment, in use or free; neighbours of one segment are linked.
struct Block {
  uintptr_t begin;
  size_t bytes, asked = 0;
  int device, stream;  // the stream whose work may reuse it at once
  bool small, in_use = false;
  Block *before = nullptr, *after = nullptr;
  Region* segment;
  std::set<std::pair<int, int>> used_on;  // other streams, by record_stream
};

struct BySize {
  bool operator()(const Block* a, const Block* b) const {
    return a->bytes != b->bytes ? a->bytes < b->bytes : a->begin < b->begin;
  }
};

struct Late {  // freed, while other streams still use it
  Block* block;
  std::vector<MomentPtr> moments;
};

struct Pool {
  std::map<uintptr_t, Block*> blocks;  // all, by address
  std::map<std::tuple<int, int, bool>, std::set<Block*, BySize>> free;  // device, stream, small
  std::vector<Late> late;
  DeviceStats stats[kMostDevices];
  bool used[kMostDevices] = {};
  size_t limit = size_t(16) << 30;
};
Pool& pool() {
  static Pool* the = new Pool();
  return *the;
}

// Sums are counted in the first entry, and by small and large in the others.
template <class F>
void count(c10::CachingAllocator::StatArray& stat, bool small, const F& change) {
  using c10::CachingAllocator::StatType;
  change(stat[size_t(StatType::AGGREGATE)]);
  change(stat[size_t(small ? StatType::SMALL_POOL : StatType::LARGE_POOL)]);
}
void more(c10::CachingAllocator::StatArray& stat, bool small, size_t n) {
  count(stat, small, [n](auto& s) { s.increase(n); });
}
void less(c10::CachingAllocator::StatArray& stat, bool small, size_t n) {
  count(stat, small, [n](auto& s) { s.decrease(n); });
}
size_t reserved(int device) { return pool().stats[device].reserved_bytes[0].current; }

std::set<Block*, BySize>& free_list(const Block& b) {
  return pool().free[{b.device, b.stream, b.small}];
}

void join(Block* left, Block* right) {  // both free
  left->bytes += right->bytes;
  left->after = right->after;
  if (left->after) left->after->before = left;
  pool().blocks.erase(right->begin);
  delete right;
}

void make_free(Block* b) {
  auto& list = free_list(*b);
  less(pool().stats[b->device].active, b->small, 1);
  less(pool().stats[b->device].active_bytes, b->small, b->bytes);
  b->in_use = false;
  auto mergeable = [&](Block* n) { return n && list.count(n); };
  if (mergeable(b->after)) {
    list.erase(b->after);
    join(b, b->after);
  }
  if (mergeable(b->before)) {
    list.erase(b->before);
    b = b->before;
    join(b, b->after);
  }
  list.insert(b);
}

void forget(Region& r, uintptr_t begin, uintptr_t end, const Clock& over) {
  std::erase_if(r.accesses, [&](const Access& a) {
    return a.begin >= begin && a.end <= end && a.clock <= entry(over, a.stream);
  });
}

void reclaim_late() {
  auto& late = pool().late;
  for (size_t i = 0; i < late.size();) {
    auto& l = late[i];
    if (!std::all_of(l.moments.begin(), l.moments.end(), [](auto& m) { return m->over(); })) {
      i++;
      continue;
    }
    for (auto& m : l.moments)
      forget(*l.block->segment, l.block->begin, l.block->begin + l.block->bytes, m->clock);
    Block* b = l.block;
    late.erase(late.begin() + i);
    make_free(b);
  }
}

// Their addresses are not used again, so work in flight may finish on them.
void release_free_segments(bool all_is_over) {
  reclaim_late();
  auto& p = pool();
  for (auto& [key, list] : p.free)
    for (auto it = list.begin(); it != list.end();) {
      Block* b = *it;
      if (b->before || b->after) {
        ++it;
        continue;
      }
      it = list.erase(it);
      less(p.stats[b->device].reserved_bytes, b->small, b->bytes);
      less(p.stats[b->device].segment, b->small, 1);
      p.stats[b->device].num_device_free++;
      if (all_is_over) madvise(alias(reinterpret_cast<void*>(b->begin)), b->bytes, MADV_DONTNEED);
      p.blocks.erase(b->begin);
      world().regions.erase(b->begin);
      delete b;
    }
}

Block* new_segment(int device, int stream, size_t bytes, bool small) {
  size_t size = small ? kSmallSegment : bytes < kOwnSegment ? kLargeSegment : round_up(bytes, kSegmentRound);
  auto& p = pool();
  auto too_much = [&] { return reserved(device) + size > p.limit; };
  if (too_much()) release_free_segments(false);
  if (too_much()) {
    p.stats[device].num_ooms++;
    TORCH_CHECK_WITH(OutOfMemoryError, false, "sim out of memory. Tried to allocate ", bytes, " bytes: ",
                     reserved(device), " of ", p.limit, " are reserved");
  }
  auto region = std::make_unique<Region>();
  region->begin = reserve_device(device, size);
  region->bytes = size;
  region->device = device;
  auto* b = new Block{region->begin, size, 0, device, stream, small};
  b->segment = region.get();
  world().regions[region->begin] = std::move(region);
  p.blocks[b->begin] = b;
  more(p.stats[device].reserved_bytes, small, size);
  more(p.stats[device].segment, small, 1);
  p.stats[device].num_device_alloc++;
  return b;
}

// Does another stream use these bytes, as far as this one knows? Among blocks of one size such a
// one is handed out first, so that memory freed too early is found again soon.
bool contested(const Block& b, Stream& s) {
  for (auto& a : b.segment->accesses)
    if (a.begin < b.begin + b.bytes && b.begin < a.end && a.stream != s.number &&
        a.clock > entry(s.clock, a.stream))
      return true;
  return false;
}

Block* take(int device, int stream_id, size_t bytes, bool small) {
  auto& list = pool().free[{device, stream_id, small}];
  Block key{0, bytes};
  auto found = list.lower_bound(&key);
  if (found == list.end()) return new_segment(device, stream_id, bytes, small);
  for (auto it = found; it != list.end() && (*it)->bytes == (*found)->bytes; ++it)
    if (contested(**it, stream(device, stream_id))) {
      found = it;
      break;
    }
  Block* b = *found;
  list.erase(found);
  return b;
}

void split(Block* b, size_t bytes) {
  size_t rest = b->bytes - bytes;
  if (b->small ? rest < kRound : rest <= kSmall) return;
  auto* tail = new Block{b->begin + bytes, rest, 0, b->device, b->stream, b->small};
  tail->segment = b->segment;
  tail->before = b;
  tail->after = b->after;
  if (tail->after) tail->after->before = tail;
  b->after = tail;
  b->bytes = bytes;
  pool().blocks[tail->begin] = tail;
  free_list(*tail).insert(tail);
}

void mark_unwritten(Region& r, uintptr_t begin, uintptr_t end) {
  auto it = r.written.upper_bound(begin);
  if (it != r.written.begin()) --it;
  while (it != r.written.end() && it->first < end) {
    auto [from, to] = *it;
    if (to <= begin) {
      ++it;
      continue;
    }
    it = r.written.erase(it);
    if (from < begin) r.written[from] = begin;
    if (to > end) r.written[end] = to;
  }
}

void free_device(void* address) {
  if (in_forked_child()) return;
  Lock lock(world().mutex);
  auto& p = pool();
  Block* b = p.blocks.at(reinterpret_cast<uintptr_t>(address));
  auto& stats = p.stats[b->device];
  less(stats.allocation, b->small, 1);
  less(stats.allocated_bytes, b->small, b->bytes);
  less(stats.requested_bytes, b->small, b->asked);
  b->in_use = false;
  if (b->used_on.empty()) return make_free(b);
  Late late{b, {}};
  for (auto& [device, id] : b->used_on) late.moments.push_back(record(stream(device, id)));
  b->used_on.clear();
  p.late.push_back(std::move(late));
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t n) override {
    check_started();
    int device = current_device();
    c10::Device where(c10::DeviceType::PrivateUse1, device);
    if (!n) return {nullptr, nullptr, &free_device, where};
    Lock lock(world().mutex);
    auto& p = pool();
    p.used[device] = true;
    reclaim_late();
    size_t bytes = round_up(n, kRound);
    bool small = bytes <= kSmall;
    Block* b = take(device, current_stream_id(device), bytes, small);
    split(b, bytes);
    b->in_use = true;
    b->asked = n;
    mark_unwritten(*b->segment, b->begin, b->begin + b->bytes);
    auto& stats = p.stats[device];
    more(stats.allocation, small, 1);
    more(stats.allocated_bytes, small, b->bytes);
    more(stats.requested_bytes, small, n);
    more(stats.active, small, 1);
    more(stats.active_bytes, small, b->bytes);
    void* at = reinterpret_cast<void*>(b->begin);
    return {at, at, &free_device, where};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_device; }
  void copy_data(void* to, const void* from, size_t n) const override {
    memcpy(alias(to), alias(const_cast<void*>(from)), n);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {  // waits, as cudaFree does
    std::vector<MomentPtr> moments;
    {
      Lock lock(world().mutex);
      for (auto& s : world().streams) moments.push_back(record(*s));
    }
    for (auto& m : moments) host_wait("", m);
    Lock lock(world().mutex);
    release_free_segments(true);
  }
  void recordStream(const c10::DataPtr& pointer, c10::Stream s) override {
    Lock lock(world().mutex);
    auto& blocks = pool().blocks;
    auto it = blocks.find(reinterpret_cast<uintptr_t>(pointer.get()));
    if (it == blocks.end()) return;
    Block* b = it->second;
    if (s.device_index() != b->device || s.id() != b->stream)
      b->used_on.insert({s.device_index(), int(s.id())});
  }
  DeviceStats getDeviceStats(c10::DeviceIndex d) override {
    Lock lock(world().mutex);
    return pool().stats[d];
  }
  template <class F>
  void every_stat(c10::DeviceIndex d, const F& change) {
    Lock lock(world().mutex);
    auto& s = pool().stats[d];
    for (auto* array : {&s.allocation, &s.segment, &s.active, &s.inactive_split, &s.allocated_bytes,
                        &s.reserved_bytes, &s.active_bytes, &s.inactive_split_bytes, &s.requested_bytes})
      for (auto& stat : *array) change(stat);
  }
  void resetAccumulatedStats(c10::DeviceIndex d) override {
    every_stat(d, [](auto& s) { s.reset_accumulated(); });
  }
  void resetPeakStats(c10::DeviceIndex d) override {
    every_stat(d, [](auto& s) { s.reset_peak(); });
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex d) override {
    Lock lock(world().mutex);
    return {pool().limit - std::min(pool().limit, reserved(d)), pool().limit};
  }
};

// --- pinned ------------------------------------------------------------------------------------
struct PinnedBlock {
  size_t bytes = 0;  // a power of two
  std::set<std::pair<int, int>> used_on;
};
struct PinnedPool {
  std::map<uintptr_t, PinnedBlock> blocks;
  std::map<size_t, std::vector<uintptr_t>> free;
  std::vector<std::pair<uintptr_t, std::vector<MomentPtr>>> late;
  PinnedStats stats;
};
PinnedPool& pinned() {
  static PinnedPool* the = new PinnedPool();
  return *the;
}

size_t power_of_two(size_t n) {
  size_t p = 1;
  while (p < n) p *= 2;
  return p;
}

void free_pinned(void* address) {
  if (in_forked_child()) return;
  Lock lock(world().mutex);
  auto at = reinterpret_cast<uintptr_t>(address);
  auto& p = pinned();
  auto& b = p.blocks.at(at);
  p.stats.allocated -= b.bytes;
  std::vector<MomentPtr> moments;
  for (auto& [device, id] : b.used_on) moments.push_back(record(stream(device, id)));
  b.used_on.clear();
  p.late.push_back({at, std::move(moments)});
}

void reclaim_pinned() {
  auto& p = pinned();
  for (size_t i = 0; i < p.late.size();) {
    auto& [at, moments] = p.late[i];
    if (!std::all_of(moments.begin(), moments.end(), [](auto& m) { return m->over(); })) {
      i++;
      continue;
    }
    Region& r = *world().regions.at(at);
    r.accesses.clear();
    open_pages(r);
    std::erase(world().closed, &r);
    p.free[p.blocks.at(at).bytes].push_back(at);
    p.late.erase(p.late.begin() + i);
  }
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    check_started();
    c10::Device where(c10::kCPU);
    if (!n) return {nullptr, nullptr, &free_pinned, where};
    Lock lock(world().mutex);
    reclaim_pinned();
    auto& p = pinned();
    size_t bytes = power_of_two(n);
    uintptr_t at;
    auto& list = p.free[bytes];
    if (!list.empty()) {
      at = list.back();
      list.pop_back();
    } else {
      auto region = std::make_unique<Region>();
      region->bytes = round_up(bytes, kPage);
      region->begin = at = reserve_pinned(region->bytes);
      region->device = -1;
      p.blocks[at].bytes = bytes;
      p.stats.reserved += bytes;
      world().regions[at] = std::move(region);
    }
    world().regions.at(at)->asked = n;
    p.stats.allocated += bytes;
    p.stats.peak = std::max(p.stats.peak, p.stats.allocated);
    void* address = reinterpret_cast<void*>(at);
    memset(address, 0xFF, n);
    return {address, address, &free_pinned, where};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
};
}  // namespace

c10::DeviceAllocator& device_allocator() {
  static auto* the = new DeviceMemory();
  return *the;
}
c10::Allocator& pinned_allocator() {
  static auto* the = new PinnedMemory();
  return *the;
}
PinnedStats& pinned_stats() { return pinned().stats; }

void use_pinned(const void* address, Stream& on) {
  Lock lock(world().mutex);
  auto& blocks = pinned().blocks;
  auto it = blocks.upper_bound(reinterpret_cast<uintptr_t>(address));
  if (it == blocks.begin()) return;
  --it;
  if (reinterpret_cast<uintptr_t>(address) < it->first + it->second.bytes)  // else it was registered
    it->second.used_on.insert({on.device, on.id});
}
void set_memory_limit(size_t bytes) {
  Lock lock(world().mutex);
  pool().limit = bytes;
}
bool ever_used(int device) {
  Lock lock(world().mutex);
  return pool().used[device];
}
void check_live(uintptr_t begin, uintptr_t end, const std::string& what) {
  Lock lock(world().mutex);
  auto& blocks = pool().blocks;
  auto it = blocks.upper_bound(begin);
  Block* b = it == blocks.begin() ? nullptr : std::prev(it)->second;
  TORCH_CHECK(b && b->in_use && end <= b->begin + b->bytes, "simulated device: illegal memory access: ", what,
              " uses memory that is not allocated");
}
}  // namespace sim
