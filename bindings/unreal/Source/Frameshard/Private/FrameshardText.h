#pragma once

#include "CoreMinimal.h"

#include <string>
#include <string_view>

/** Conversions between the engine's FString and the client library's UTF-8. */
inline FString FrameshardText(std::string_view Text)
{
	const FUTF8ToTCHAR Converted(Text.data(), static_cast<int32>(Text.size()));
	return FString(Converted.Length(), Converted.Get());
}

inline std::string FrameshardUtf8(const FString& Text)
{
	const FTCHARToUTF8 Converted(*Text);
	return std::string(Converted.Get(), static_cast<size_t>(Converted.Length()));
}
