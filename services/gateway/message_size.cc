#include "ballast/services/gateway/message_size.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/message.h>
#include <grpcpp/support/proto_buffer_reader.h>

#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"

namespace ballast::services {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::MessageFactory;
using google::protobuf::io::CodedInputStream;

constexpr uint64_t kAllocation = 16;              // what malloc adds to each; in an arena, earlier arrays of pointers
constexpr uint64_t kPointer = 2 * sizeof(void*);  // in an array that grows by doubling
constexpr uint64_t kText = sizeof(std::string) + kAllocation;
constexpr uint64_t kUnknown = 48;                   // a field of a later version, in a list that grows
constexpr uint64_t kNumber = 4 * sizeof(uint64_t);  // in an array that grows by doubling, and those before it

constexpr int kGroupsMax = 100;  // one in another, as parsing allows

// The encoding of Protocol Buffers: a tag is a field's number, and in its last three bits how the value is written.
enum Wire : uint32_t { kVarint = 0, kFixed64 = 1, kDelimited = 2, kBeginOfGroup = 3, kEndOfGroup = 4, kFixed32 = 5 };
constexpr int kWireBits = 3;
Wire WireOf(uint32_t tag) { return static_cast<Wire>(tag & ((1U << kWireBits) - 1)); }

Wire WireOf(const FieldDescriptor& field) {
  switch (field.type()) {
    case FieldDescriptor::TYPE_DOUBLE:
    case FieldDescriptor::TYPE_FIXED64:
    case FieldDescriptor::TYPE_SFIXED64:
      return kFixed64;
    case FieldDescriptor::TYPE_FLOAT:
    case FieldDescriptor::TYPE_FIXED32:
    case FieldDescriptor::TYPE_SFIXED32:
      return kFixed32;
    case FieldDescriptor::TYPE_STRING:
    case FieldDescriptor::TYPE_BYTES:
    case FieldDescriptor::TYPE_MESSAGE:
      return kDelimited;
    case FieldDescriptor::TYPE_GROUP:
      return kBeginOfGroup;
    default:
      return kVarint;
  }
}

// What counting has to know of a type.
struct Shape {
  struct Field {
    Wire wire = kVarint;
    const Shape* message = nullptr;  // null: no message
    bool packable = false;           // a repeated number
  };
  uint64_t own_bytes = 0;
  absl::flat_hash_map<int, Field> fields;
};

class Shapes {
 public:
  const Shape* Of(const Descriptor* type) ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    return Make(type);
  }

 private:
  const Shape* Make(const Descriptor* type) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    std::unique_ptr<Shape>& shape = shapes_[type];
    if (shape != nullptr) return shape.get();
    shape = std::make_unique<Shape>();
    Shape* const made = shape.get();  // the map may move the pointer
    made->own_bytes = MessageFactory::generated_factory()->GetPrototype(type)->SpaceUsedLong() + kAllocation + kPointer;
    for (int i = 0; i < type->field_count(); ++i) {
      const FieldDescriptor* const field = type->field(i);
      Shape::Field& known = made->fields[field->number()];
      known.wire = WireOf(*field);
      if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) known.message = Make(field->message_type());
      known.packable = field->is_packable();
    }
    return made;
  }

  absl::Mutex mu_;
  absl::flat_hash_map<const Descriptor*, std::unique_ptr<Shape>> shapes_ ABSL_GUARDED_BY(mu_);
};

class Counting {
 public:
  Counting(CodedInputStream* in, uint64_t max) : in_(in), max_(max) {}

  // False once counting need not go on.
  bool Message(const Shape& shape) {
    Add(shape.own_bytes);
    while (bytes_ <= max_) {
      const uint32_t tag = in_->ReadTag();
      if (tag == 0) return in_->ConsumedEntireMessage();
      const auto found = shape.fields.find(static_cast<int>(tag >> kWireBits));
      if (!Field(tag, found == shape.fields.end() ? nullptr : &found->second)) return false;
    }
    return false;
  }
  uint64_t bytes() const { return bytes_; }

 private:
  void Add(uint64_t bytes) { bytes_ += bytes; }

  // `field`: null for one of a later version.
  bool Field(uint32_t tag, const Shape::Field* field) {
    const Wire wire = WireOf(tag);
    if (wire == kBeginOfGroup) return Group();
    if (wire == kDelimited) return Delimited(field);
    if (field == nullptr || field->wire != wire) {
      Add(kUnknown);
    } else if (field->packable) {
      Add(kNumber);
    }
    return SkipNumber(wire);
  }
  // No message has groups, so all within is of a later version, whatever its numbers.
  bool Group() {
    Add(2 * kUnknown);
    if (++groups_ > kGroupsMax) return false;
    while (bytes_ <= max_) {
      const uint32_t tag = in_->ReadTag();
      if (tag == 0) return false;
      if (WireOf(tag) == kEndOfGroup) {
        --groups_;
        return true;
      }
      if (!Field(tag, nullptr)) return false;
    }
    return false;
  }
  bool SkipNumber(Wire wire) {
    uint64_t ignored = 0;
    if (wire == kVarint) return in_->ReadVarint64(&ignored);
    if (wire == kFixed64) return in_->Skip(sizeof(uint64_t));
    if (wire == kFixed32) return in_->Skip(sizeof(uint32_t));
    return true;  // the end of a group, or no wire type at all
  }
  bool Delimited(const Shape::Field* field) {
    int length = 0;
    if (!in_->ReadVarintSizeAsInt(&length)) return false;
    if (field == nullptr || (field->message == nullptr && !field->packable)) {
      Add(kUnknown + kText + kPointer + static_cast<uint64_t>(length));
      return in_->Skip(length);
    }
    const auto outer = in_->PushLimit(length);
    bool whole = true;
    if (field->message != nullptr) {
      whole = Message(*field->message);
    } else {
      while (whole && bytes_ <= max_ && in_->BytesUntilLimit() > 0) {
        Add(kNumber);
        whole = SkipNumber(field->wire);
      }
    }
    in_->PopLimit(outer);
    return whole;
  }

  CodedInputStream* const in_;
  const uint64_t max_;
  uint64_t bytes_ = 0;
  int groups_ = 0;  // open ones
};

}  // namespace

std::optional<uint64_t> ParsedBytes(const Descriptor* type, const grpc::ByteBuffer& bytes, uint64_t max) {
  static auto* const shapes = new Shapes;
  grpc::ByteBuffer buffer(bytes);  // shares the slices
  grpc::ProtoBufferReader reader(&buffer);
  CodedInputStream in(&reader);
  Counting counting(&in, max);
  const bool whole = counting.Message(*shapes->Of(type));
  if (!whole && counting.bytes() <= max) return std::nullopt;
  return counting.bytes() + bytes.Length();
}

}  // namespace ballast::services
