// The parts of Unreal that the plugin uses, so that it compiles and runs without the engine. Signatures are those of
// Unreal Engine 5. Code that the engine's tools generate is left out.
#pragma once

#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

using uint8 = std::uint8_t;
using int32 = std::int32_t;
using int64 = std::int64_t;
using uint32 = std::uint32_t;
using uint64 = std::uint64_t;
using TCHAR = char16_t;
using ANSICHAR = char;

#define TEXT(Literal) u##Literal
#define FRAMESHARD_API
#define UCLASS(...)
#define USTRUCT(...)
#define UENUM(...)
#define UMETA(...)
#define UPROPERTY(...)
#define UFUNCTION(...)
#define GENERATED_BODY()

class FString {
  public:
    FString() = default;
    FString(const TCHAR *Text) : Text_(Text) {}
    FString(int32 Count, const TCHAR *Text) : Text_(Text, static_cast<size_t>(Count)) {}
    const TCHAR *operator*() const { return Text_.c_str(); }
    bool IsEmpty() const { return Text_.empty(); }
    int32 Len() const { return static_cast<int32>(Text_.size()); }
    FString &operator+=(const FString &Other) {
        Text_ += Other.Text_;
        return *this;
    }
    friend bool operator==(const FString &Left, const FString &Right) { return Left.Text_ == Right.Text_; }

  private:
    std::u16string Text_;
};

template <class K, class V> struct TPair {
    K Key;
    V Value;
};

template <class K, class V> class TMap {
  public:
    V &Add(const K &Key, const V &Value) { return Items.emplace_back(TPair<K, V>{Key, Value}).Value; }
    auto begin() const { return Items.begin(); }
    auto end() const { return Items.end(); }

  private:
    std::vector<TPair<K, V>> Items;
};

template <class T> class TArray {
  public:
    int32 Num() const { return static_cast<int32>(Items.size()); }
    const T *GetData() const { return Items.data(); }
    void Add(const T &Item) { Items.push_back(Item); }
    void Append(const T *First, int32 Count) { Items.insert(Items.end(), First, First + Count); }
    void Init(const T &Item, int32 Count) { Items.assign(static_cast<size_t>(Count), Item); }
    auto begin() const { return Items.begin(); }
    auto end() const { return Items.end(); }

  private:
    std::vector<T> Items;
};

class FUTF8ToTCHAR {
  public:
    FUTF8ToTCHAR(const ANSICHAR *Source, int32 Length) {
        for (int32 At = 0; At < Length;) {
            const unsigned First = static_cast<unsigned char>(Source[At++]);
            const int More = First >= 0xf0 ? 3 : First >= 0xe0 ? 2 : First >= 0xc0 ? 1 : 0;
            uint32 Point = More == 0 ? First : First & (0x3fu >> More);
            for (int Index = 0; Index < More; ++Index) {
                Point = Point << 6 | (static_cast<unsigned char>(Source[At++]) & 0x3fu);
            }
            if (Point >= 0x10000) {
                Text.push_back(static_cast<char16_t>(0xd7c0 + (Point >> 10)));
                Point = 0xdc00 + (Point & 0x3ff);
            }
            Text.push_back(static_cast<char16_t>(Point));
        }
    }
    const TCHAR *Get() const { return Text.c_str(); }
    int32 Length() const { return static_cast<int32>(Text.size()); }

  private:
    std::u16string Text;
};

class FTCHARToUTF8 {
  public:
    explicit FTCHARToUTF8(const TCHAR *Source) {
        for (; *Source != 0; ++Source) {
            uint32 Point = *Source;
            if (Point >= 0xd800 && Point < 0xdc00 && Source[1] != 0) {
                Point = 0x10000 + ((Point - 0xd800) << 10) + (*++Source - 0xdc00u);
            }
            const int More = Point >= 0x10000 ? 3 : Point >= 0x800 ? 2 : Point >= 0x80 ? 1 : 0;
            const unsigned Mark[] = {0x00, 0xc0, 0xe0, 0xf0};
            Text.push_back(static_cast<char>(Mark[More] | Point >> (6 * More)));
            for (int Index = More - 1; Index >= 0; --Index) {
                Text.push_back(static_cast<char>(0x80 | (Point >> (6 * Index) & 0x3f)));
            }
        }
    }
    const ANSICHAR *Get() const { return Text.c_str(); }
    int32 Length() const { return static_cast<int32>(Text.size()); }

  private:
    std::string Text;
};

class FName {
  public:
    FName(const TCHAR *) {}
};

class FText {
  public:
    static FText FromString(const FString &Text) {
        FText Made;
        Made.Text_ = Text;
        return Made;
    }
    static FText AsNumber(int64 Number) {
        return FromString(
            FString(FUTF8ToTCHAR(std::to_string(Number).c_str(), int32(std::to_string(Number).size())).Get()));
    }
    template <class... Params> static FText Format(const FText &Pattern, const Params &...) { return Pattern; }
    const FString &ToString() const { return Text_; }
    bool IsEmpty() const { return Text_.IsEmpty(); }

  private:
    FString Text_;
};

struct FVector {
    FVector(double X, double Y, double Z) : X(X), Y(Y), Z(Z) {}
    double X, Y, Z;
};

struct FRotator {
    static const FRotator ZeroRotator;
};
inline const FRotator FRotator::ZeroRotator = {};

#define DEFINE_LOG_CATEGORY_STATIC(Category, Default, Compiled)
#define UE_LOG(Category, Verbosity, Format, Text) std::fprintf(stderr, "%s\n", FTCHARToUTF8(Text).Get())

class UWorld;

class UObject {
  public:
    virtual ~UObject() = default;
    virtual UWorld *GetWorld() const { return nullptr; }
    FString GetName() const { return Name; }
    FString GetPathName() const {
        FString Path = TEXT("/Game/UEDPIE_0_Town.Town:PersistentLevel.");
        Path += Name;
        return Path;
    }
    bool IsTemplate() const { return false; }
    template <class T> T *CreateDefaultSubobject(FName);

    FString Name;                                               // not in Unreal
    const std::shared_ptr<int> Alive = std::make_shared<int>(); // not in Unreal
};

template <class T> class TWeakObjectPtr {
  public:
    TWeakObjectPtr() = default;
    TWeakObjectPtr(T *Object) : Object_(Object) {
        if (Object != nullptr) {
            Alive = Object->Alive;
        }
    }
    T *Get() const { return Alive.expired() ? nullptr : Object_; }
    bool IsValid() const { return Get() != nullptr; }
    T *operator->() const { return Get(); }

  private:
    T *Object_ = nullptr;
    std::weak_ptr<int> Alive;
};

template <class T> T *CastChecked(UObject *Object) { return static_cast<T *>(Object); }

template <class T> T *NewObject() {
    static std::vector<std::unique_ptr<T>> Made; // keeps objects alive, as Unreal's garbage collector does
    Made.push_back(std::make_unique<T>());
    return Made.back().get();
}

template <class T> T *UObject::CreateDefaultSubobject(FName) { return NewObject<T>(); }

template <class T> T *GetMutableDefault() {
    static T Default;
    return &Default;
}
template <class T> const T *GetDefault() { return GetMutableDefault<T>(); }

template <class... Params> class TStubDelegate {
  public:
    void Broadcast(Params... Values) const {
        for (const auto &Listener : Listeners) {
            Listener(Values...);
        }
    }
    template <class Object, class Class> void AddDynamic(Object *Listener, void (Class::*Method)(Params...)) {
        Listeners.push_back([Listener, Method](Params... Values) { (Listener->*Method)(Values...); });
    }
    std::vector<std::function<void(Params...)>> Listeners; // not in Unreal
};
#define DECLARE_DYNAMIC_MULTICAST_DELEGATE(Name) using Name = TStubDelegate<>
#define DECLARE_DYNAMIC_MULTICAST_DELEGATE_OneParam(Name, Type1, Param1) using Name = TStubDelegate<Type1>
#define DECLARE_DYNAMIC_MULTICAST_DELEGATE_TwoParams(Name, Type1, Param1, Type2, Param2)                               \
    using Name = TStubDelegate<Type1, Type2>
#define DECLARE_DYNAMIC_MULTICAST_DELEGATE_ThreeParams(Name, Type1, Param1, Type2, Param2, Type3, Param3)              \
    using Name = TStubDelegate<Type1, Type2, Type3>

struct TStatId {};
#define RETURN_QUICK_DECLARE_CYCLE_STAT(Class, Group) return TStatId()
